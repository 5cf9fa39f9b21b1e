"""`python -m router.text.export FOLDER`: the tokenizer in the format of `transformers`, for clients only.

Reads tiktoken.model and chat_format.json of a model folder and writes tokenizer.json and tokenizer_config.json beside
them: the same ids for the same text, and a Jinja chat template that renders the same prompts as `template.py` for
chats without tools. The router itself never reads these files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from router.text.chat_format import FILE_NAME, ChatFormat, load_chat_format
from router.text.tokenizer import SPLIT_PATTERN, Tokenizer, read_ranks

# Tags are built from these: a client that skips special tokens must still see them.
STRUCTURAL = ("open", "close", "sep")


def byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in byte-level BPE files: itself when printable, else one from 256 up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + place) for place, byte in enumerate(others)}


def merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every way two ranks make a third, ordered by the third: the merge list of the same BPE."""
    found: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                found.append((rank, ranks[left], ranks[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def tokenizer_json(
    ranks: Mapping[bytes, int], tokenizer: Tokenizer, chat_format: ChatFormat
) -> dict[str, Any]:
    """The document `tokenizers` loads."""
    letters = byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    structural = {chat_format.control_text[name] for name in STRUCTURAL}
    added = [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": text not in structural,
        }
        for token, text in _special_tokens(tokenizer)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": SPLIT_PATTERN},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": False,
                    "use_regex": False,
                },
            ],
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {spelled(token): rank for token, rank in ranks.items()},
            "merges": [[spelled(left), spelled(right)] for left, right in merges(ranks)],
        },
    }


def tokenizer_config(
    chat_format: ChatFormat, max_model_len: int, *, template: str
) -> dict[str, Any]:
    """The document `transformers` loads beside it."""
    text = chat_format.control_text
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": text["bos"],
        "eos_token": text["end_of_msg"],
        "pad_token": text["pad"],
        "model_max_length": max_model_len,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_prefix_space": False,
        "chat_template": template,
    }


def chat_template(chat_format: ChatFormat) -> str:
    """Jinja for chats without tools; a chat with tools raises, because only the renderer does those."""
    text = chat_format.control_text
    names = {
        "open_": text["open"],
        "close_": text["close"],
        "sep": text["sep"],
        "end": text["end_of_msg"],
        "effort_text": chat_format.thinking_effort,
        "default_effort": chat_format.default_effort,
    }
    constants = "".join(
        f"{{%- set {name} = {json.dumps(value, ensure_ascii=False) if value is not None else 'none'} -%}}"
        for name, value in names.items()
    )
    return constants + TEMPLATE


TEMPLATE = """\
{%- set thinking = thinking if thinking is defined else true -%}
{%- set thinking_effort = thinking_effort if thinking_effort is defined else default_effort -%}
{%- set add_generation_prompt = add_generation_prompt if add_generation_prompt is defined else true -%}
{%- if tools is defined and tools -%}
{{- raise_exception('tools are rendered by the server, not by this template') -}}
{%- endif -%}
{%- macro tag(name) -%}{{ open_ + name + sep }}{%- endmacro -%}
{%- macro close(name) -%}{{ close_ + name + sep }}{%- endmacro -%}
{%- macro escape(value) -%}{{ value | replace('&', '&amp;') | replace('"', '&quot;') }}{%- endmacro -%}
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if thinking and thinking_effort -%}
{{- open_ + 'message role="system" type="thinking-effort"' + sep -}}
{{- effort_text | replace('{effort}', thinking_effort) -}}
{{- close('message') + end -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.tool_calls or message.role == 'tool' -%}
{{- raise_exception('tool calls are rendered by the server, not by this template') -}}
{%- endif -%}
{%- set role = 'system' if message.role == 'developer' else message.role -%}
{{- open_ + 'message role="' + escape(role) + '"' -}}
{%- if message.name -%}{{- ' name="' + escape(message.name) + '"' -}}{%- endif -%}
{{- sep -}}
{%- if role == 'assistant' -%}
{%- if thinking -%}
{{- tag('think') + (message.reasoning_content or '') + close('think') -}}
{%- endif -%}
{{- tag('response') + text_of(message.content) + close('response') -}}
{%- else -%}
{{- text_of(message.content) -}}
{%- endif -%}
{{- close('message') + end -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- open_ + 'message role="assistant"' + sep + tag('think' if thinking else 'response') -}}
{%- endif -%}
"""


def export(folder: Path) -> list[Path]:
    """Write both files into the folder; returns their paths. ModelError when the folder has no tiktoken file."""
    tokenizer, chat_format = load_chat_format(folder)
    ranks = read_ranks(folder / "tiktoken.model")
    config = json.loads((folder / "config.json").read_bytes())
    limit = int(config.get("text_config", config)["max_position_embeddings"])
    documents = {
        "tokenizer.json": tokenizer_json(ranks, tokenizer, chat_format),
        "tokenizer_config.json": tokenizer_config(
            chat_format, limit, template=chat_template(chat_format)
        ),
    }
    for name, document in documents.items():
        text = json.dumps(document, ensure_ascii=False, indent=1)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    return [folder / name for name in documents]


def _special_tokens(tokenizer: Tokenizer) -> list[tuple[int, str]]:
    ids = range(tokenizer.base, tokenizer.vocab_size)
    return [(token, tokenizer.token_bytes(token).decode()) for token in ids]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, help=f"model folder with tiktoken.model and {FILE_NAME}"
    )
    for path in export(parser.parse_args(argv).folder):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
