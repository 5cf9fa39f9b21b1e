"""What the router needs of a model folder: tokenizer, chat format, limits and default sampling; never the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from k3.errors import ModelError
from k3.model.fields import Fields
from k3.types import SAMPLING_RANGES
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
    text = config.section("text_config") if "text_config" in config.values else config
    vocab_size, own_limit = text.size("vocab_size"), text.size("max_position_embeddings")
    generation_path = path / "generation_config.json"
    generation = (
        _read(generation_path) if generation_path.exists() else Fields({}, str(generation_path))
    )
    tokenizer, chat_format = load_chat_format(path)
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
        eos_token_ids=_eos_ids(generation, chat_format, vocab_size),
        default_temperature=_temperature(generation),
    )


def _eos_ids(generation: Fields, chat_format: ChatFormat, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer; the chat format's end of message when the folder names none."""
    given: object = generation.values.get("eos_token_id")
    if given is None:
        return (chat_format.control.end_of_msg,)
    ids = cast("list[int]", given if isinstance(given, list) else [given])
    if any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
        raise generation.error("eos_token_id", ids, f"an id or ids in 0..{vocab_size - 1}")
    return tuple(ids)


def _temperature(generation: Fields) -> float:
    """What a request without a temperature gets."""
    given = generation.nullable_number("temperature")
    if given is None:
        return 1.0
    allowed = SAMPLING_RANGES["temperature"]
    if not allowed.least <= given <= allowed.most:
        raise generation.error("temperature", given, str(allowed))
    return given


def _read(path: Path) -> Fields:
    """A file that holds one JSON object."""
    try:
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path}: a JSON {type(document).__name__}; expected an object")
    return Fields(cast("dict[str, Any]", document), str(path))
