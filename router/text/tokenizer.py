"""Text to token ids and back to bytes: K3's tiktoken files, and bytes for the test model.

A `Tokenizer` is a codec for ordinary text plus special tokens that sit above it. Which specials there are is data of
the model folder (`chat_format.json`), their ids are `base + offset` with base = number of ordinary ids. Ordinary text
never becomes a special token: only callers that pass a segment with `is_control` get one. Decoding works in bytes;
`detokenize.py` turns bytes into text.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import tiktoken

from k3.errors import ModelError

# K3's pre-tokenizer, its alternatives in order: Han run; word ending in lower case; word starting in upper case (both
# with an optional leading mark and English contraction); up to three digits; punctuation; line ends; blanks.
_HAN_FREE_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_HAN_FREE_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_HAN_FREE_UPPER}*{_HAN_FREE_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_HAN_FREE_UPPER}+{_HAN_FREE_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# The pattern engine's cost grows with the piece and with runs it cannot split.
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000


class Segment(NamedTuple):
    """A piece of a rendered prompt, encoded by itself; only control segments may name special tokens."""

    text: str
    is_control: bool = False


class Codec(Protocol):
    """Ordinary text to ids `0 .. n_ids - 1` and back to bytes."""

    @property
    def n_ids(self) -> int:
        """Number of ordinary ids."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text without any special token."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of an ordinary id."""
        ...


class ByteCodec:
    """One id per UTF-8 byte: the tokenizer of the test model."""

    n_ids = 256

    def encode(self, text: str) -> list[int]:
        """The bytes themselves."""
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        """The byte itself."""
        return bytes((token_id,))


class TiktokenCodec:
    """Byte pair encoding with ranks in tiktoken's file format and K3's pre-tokenizer."""

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        self._encoding = tiktoken.Encoding(
            "k3", pat_str=SPLIT_PATTERN, mergeable_ranks=dict(ranks), special_tokens={}
        )
        self.n_ids = len(ranks)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; long pieces and runs are cut first."""
        return [
            token
            for piece in cut_long_runs(text)
            for token in self._encoding.encode_ordinary(piece)
        ]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one rank."""
        return self._encoding.decode_single_token_bytes(token_id)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read `base64(token) rank` lines. ModelError when a line is wrong or ranks are not 0..n-1."""
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ModelError(f"{path}: cannot read the tokenizer ({error.strerror})") from error
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ModelError(
                f"{path}:{number}: {line[:60]!r} is not `base64(token) rank`"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(
            f"{path}: ranks of {len(ranks)} tokens must be 0..{len(ranks) - 1}, each once"
        )
    return ranks


_RUN = re.compile(r"\s+|\S+")  # linear; a pattern with a minimum length would try every start


def cut_long_runs(text: str) -> Iterator[str]:
    """Cut into pieces of at most MAX_PIECE_CHARS, and cut runs of more than MAX_RUN_CHARS (non-)blanks."""
    for start in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[start : start + MAX_PIECE_CHARS]
        cut = 0
        runs = _RUN.finditer(piece) if len(piece) > MAX_RUN_CHARS else ()
        for run in runs:
            for end in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield piece[cut:end]
                cut = end
        yield piece[cut:]


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Ids of the tokens that carry structure. `open`, `close` and `sep` build the tags of a chat."""

    bos: int
    eos: int
    end_of_msg: int
    open: int
    close: int
    sep: int
    pad: int


class Tokenizer:
    """A codec plus special tokens. Immutable and safe to share between threads."""

    def __init__(
        self, codec: Codec, special_offsets: Mapping[str, int], n_special_slots: int
    ) -> None:
        self._codec = codec
        self.base = codec.n_ids
        self.vocab_size = codec.n_ids + n_special_slots
        wrong = {text: at for text, at in special_offsets.items() if not 0 <= at < n_special_slots}
        if wrong or len(set(special_offsets.values())) != len(special_offsets):
            raise ModelError(
                f"special token offsets {dict(special_offsets)}: must be distinct and in 0..{n_special_slots - 1}"
            )
        self.specials: Mapping[str, int] = {
            text: self.base + offset for text, offset in special_offsets.items()
        }
        self._special_text = {token: text for text, token in self.specials.items()}
        longest_first = sorted(self.specials, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)))

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of a text. With `allow_special`, special tokens written out in it become those tokens."""
        if not allow_special or not self.specials:
            return self._codec.encode(text)
        ids: list[int] = []
        cut = 0
        for match in self._special_pattern.finditer(text):
            ids += self._codec.encode(text[cut : match.start()])
            ids.append(self.specials[match.group()])
            cut = match.end()
        return ids + self._codec.encode(text[cut:])

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a rendered prompt; every segment is encoded by itself."""
        ids: list[int] = []
        for segment in segments:
            ids += self.encode(segment.text, allow_special=segment.is_control)
        return ids

    def is_special(self, token_id: int) -> bool:
        """Whether the id lies above ordinary text."""
        return token_id >= self.base

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of any id of the vocabulary; specials give the UTF-8 of their name."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside 0..{self.vocab_size - 1}")
        if token_id < self.base:
            return self._codec.token_bytes(token_id)
        return self._special_text.get(token_id, f"<|reserved_token_{token_id}|>").encode()

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(
            self.token_bytes(token)
            for token in token_ids
            if not (skip_special_tokens and self.is_special(token))
        ).decode("utf-8", "replace")
