"""`chat_format.json`: the words and tokens a model folder brings for its chats.

Every sentence of the built-in system messages, the special tokens with their offsets and the thinking efforts are data
of the model; `template.py` only knows the structure. Placeholders in sentences: `{tools}`, `{effort}`, `{schema}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from k3.errors import ModelError
from router.text.tokenizer import (
    ByteCodec,
    Codec,
    ControlTokens,
    TiktokenCodec,
    Tokenizer,
    read_ranks,
)

FILE_NAME = "chat_format.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Sentences of the built-in system messages, and what efforts a caller may ask for."""

    control: ControlTokens
    control_text: Mapping[str, str]
    default_effort: str | None
    efforts: tuple[str, ...]
    effort_aliases: Mapping[str, str]
    media_ids: frozenset[
        int
    ]  # placeholders of images and the like: refused, this system is text only
    tool_declaration: str
    dynamic_tool_declaration: str
    thinking_effort: str
    tool_choice: Mapping[str, str]
    response_format: Mapping[str, str]

    def effort(self, asked: str) -> str | None:
        """The model's effort for a caller's word; None when it knows no such word."""
        name = self.effort_aliases.get(asked, asked)
        return name if name in self.efforts else None


def load_chat_format(folder: Path) -> tuple[Tokenizer, ChatFormat]:
    """Tokenizer and chat format of a model folder. ModelError names what is missing and where."""
    path = folder / FILE_NAME
    try:
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(
            f"{path}: cannot read the chat format ({error.strerror}); a served model folder needs this file: copy the "
            "one of the embedded model and adapt its specials, or export one with `python -m router.text.export`"
        ) from error
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    try:
        if document["version"] != VERSION:
            raise ModelError(
                f"{path}: version {document['version']!r}: this program reads {VERSION}"
            )
        tokenizer = _tokenizer(folder, document["tokenizer"])
        return tokenizer, _format(document, tokenizer)
    except KeyError as error:
        raise ModelError(
            f"{path}: {error.args[0]!r} is missing or names no special token"
        ) from error
    except (TypeError, AttributeError) as error:
        raise ModelError(f"{path}: has the wrong shape: {error}") from error


def _tokenizer(folder: Path, section: Mapping[str, Any]) -> Tokenizer:
    codec: Codec
    match section["kind"]:
        case "tiktoken":
            codec = TiktokenCodec(read_ranks(folder / str(section["file"])))
        case "bytes":
            codec = ByteCodec()
        case other:
            raise ModelError(
                f"{folder / FILE_NAME}: tokenizer.kind={other!r}: must be 'tiktoken' or 'bytes'"
            )
    return Tokenizer(codec, section["specials"], int(section["special_slots"]))


def _format(document: Mapping[str, Any], tokenizer: Tokenizer) -> ChatFormat:
    names = cast("Mapping[str, str]", document["tokens"])
    thinking, messages = document["thinking"], document["messages"]
    return ChatFormat(
        control=ControlTokens(
            **{field: tokenizer.specials[names[field]] for field in ControlTokens.__slots__}
        ),
        control_text=names,
        default_effort=thinking["default_effort"],
        efforts=tuple(thinking["efforts"]),
        effort_aliases=thinking["aliases"],
        media_ids=frozenset(tokenizer.specials[name] for name in document["media_tokens"]),
        tool_declaration=messages["tool_declaration"],
        dynamic_tool_declaration=messages["dynamic_tool_declaration"],
        thinking_effort=messages["thinking_effort"],
        tool_choice=messages["tool_choice"],
        response_format=messages["response_format"],
    )
