"""The small BPE of k3-mini: K3's split pattern and file format, 3,840 ranks, no rank with two digits.

Digits are split one by one while the ranks are learned, so `\\p{N}{1,3}` of the pattern still encodes every
number digit by digit. Layout of the 256 specials is K3's in small. `train` learns ranks, `write_tiktoken`
stores them, `load` gives an encoder. The twin `tokenizer.json` is made by `router.text.export`.
"""

import base64
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import regex
import tiktoken

N_RANKS = 3840
N_SPECIALS = 256
_HAN = r"[\p{Han}]+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        _HAN,
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_TAIL}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
NAMED_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    240: "[MASK]",
    255: "[PAD]",
}


@dataclass(frozen=True, slots=True)
class Special:
    """Ids of the specials the training uses, for a vocabulary of `base` ranks."""

    base: int = N_RANKS

    @property
    def end_of_msg(self) -> int:
        """The generation eos."""
        return self.base + 2

    @property
    def open(self) -> int:
        """`<|open|>`."""
        return self.base + 3

    @property
    def close(self) -> int:
        """`<|close|>`."""
        return self.base + 4

    @property
    def sep(self) -> int:
        """`<|sep|>`."""
        return self.base + 5

    @property
    def mask(self) -> int:
        """Input of the drafter's free slots; never produced."""
        return self.base + 240

    @property
    def pad(self) -> int:
        """Padding of packed batches; never produced."""
        return self.base + 255

    def names(self) -> dict[str, int]:
        """All 256 specials by name."""
        return {
            NAMED_SPECIALS.get(i, f"<|reserved_token_{self.base + i}|>"): self.base + i
            for i in range(N_SPECIALS)
        }


def train(texts: Iterable[str], n_ranks: int = N_RANKS) -> list[bytes]:
    """Learn `n_ranks` byte-pair ranks (the 256 bytes first); ties go to the lexicographically smaller pair."""
    splitter = regex.compile("(?V1)" + PATTERN)
    counts: Counter[bytes] = Counter()
    for text in texts:
        for piece in splitter.findall(text):
            if piece[0].isdigit():
                continue
            counts[piece.encode()] += 1
    words = [([bytes([b]) for b in word], n) for word, n in counts.items() if len(word) > 1]
    pairs: Counter[tuple[bytes, bytes]] = Counter()
    where: defaultdict[tuple[bytes, bytes], set[int]] = defaultdict(set)
    for at, (parts, n) in enumerate(words):
        for pair in pairwise(parts):
            pairs[pair] += n
            where[pair].add(at)
    ranks = [bytes([b]) for b in range(256)]
    known = set(ranks)
    while len(ranks) < n_ranks:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if pairs[best] <= 0:
            raise ValueError(
                f"corpus gives only {len(ranks)} ranks, wanted {n_ranks}; use more text"
            )
        merged = best[0] + best[1]
        if merged not in known:
            ranks.append(merged)
            known.add(merged)
        for at in sorted(where.pop(best)):
            parts, n = words[at]
            for pair in pairwise(parts):
                pairs[pair] -= n
            _merge(parts, best, merged)
            for pair in pairwise(parts):
                pairs[pair] += n
                where[pair].add(at)
        del pairs[best]
    return ranks


def _merge(parts: list[bytes], pair: tuple[bytes, bytes], merged: bytes) -> None:
    at = 0
    while at < len(parts) - 1:
        if parts[at] == pair[0] and parts[at + 1] == pair[1]:
            parts[at : at + 2] = [merged]
        at += 1


def write_tiktoken(ranks: list[bytes], path: Path) -> None:
    """K3's file: `base64(token) rank` a line."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
    path.write_text("".join(lines), encoding="ascii")


def read_tiktoken(path: Path) -> list[bytes]:
    """Ranks of a tiktoken file in order."""
    lines = path.read_text(encoding="ascii").splitlines()
    return [base64.b64decode(line.split()[0]) for line in lines]


def load(path: Path) -> tiktoken.Encoding:
    """Encoder of a tiktoken file; `encode_ordinary` never yields specials."""
    ranks = read_tiktoken(path)
    return tiktoken.Encoding(
        "k3-mini",
        pat_str=PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
        special_tokens=Special(len(ranks)).names(),
    )
