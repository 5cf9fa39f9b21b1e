"""What the router needs of a model folder: tokenizer, chat format, limits and default sampling; never the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from k3.errors import ModelError
from router.text.chat_format import ChatFormat, load_chat_format
from router.text.template import Template
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A served model as the router sees it."""

    name: str
    tokenizer: Tokenizer
    chat_format: ChatFormat
    template: Template
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_temperature: float


def load_model_folder(path: Path, name: str, max_model_len: int = 0) -> ModelFolder:
    """Read config.json, chat_format.json and, when there is one, generation_config.json.

    max_model_len: lowers the model's own limit; 0 = the model's.  ModelError names the file and the field.
    """
    config = _read(path / "config.json")
    text = config.get("text_config", config)
    generation_path = path / "generation_config.json"
    generation = _read(generation_path) if generation_path.exists() else {}
    tokenizer, chat_format = load_chat_format(path)
    try:
        vocab_size, own_limit = int(text["vocab_size"]), int(text["max_position_embeddings"])
    except KeyError as error:
        raise ModelError(f"{path / 'config.json'}: field {error.args[0]!r} is missing") from error
    if tokenizer.vocab_size != vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the model a vocabulary of {vocab_size}; "
            "every id that can be drawn needs its bytes: correct tokenizer.special_slots or the checkpoint"
        )
    return ModelFolder(
        name=name,
        tokenizer=tokenizer,
        chat_format=chat_format,
        template=Template(chat_format),
        vocab_size=vocab_size,
        max_model_len=min(own_limit, max_model_len or own_limit),
        eos_token_ids=_eos_ids(generation, chat_format),
        default_temperature=float(generation.get("temperature", 1.0)),
    )


def _eos_ids(generation: Mapping[str, Any], chat_format: ChatFormat) -> tuple[int, ...]:
    """Ids that end an answer; the chat format's end of message when the folder names none."""
    ids: int | list[int] = generation.get("eos_token_id", chat_format.control.end_of_msg)
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _read(path: Path) -> dict[str, Any]:
    try:
        return orjson.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
