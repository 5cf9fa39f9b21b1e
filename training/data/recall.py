"""Recall documents: facts hidden in filler, then questions as further turns.

Filler is paragraphs of filler.txt.xz (60 %) and grammar sentences (40 %), one a line. A line ends in a newline, where
the tokenizer's pattern always splits, so encoded lines may be concatenated.
"""

import lzma
import random
from dataclasses import dataclass
from pathlib import Path

from training.data.grammar import Grammar
from training.data.words import ADJECTIVES, NAMES, NOUNS, THINGS

HERE = Path(__file__).parent
GRAMMAR = Grammar.read(HERE / "recall.txt")


def paragraphs() -> tuple[str, ...]:
    """Natural paragraphs, one line each, without the attribution header."""
    lines = lzma.decompress((HERE / "filler.txt.xz").read_bytes()).decode().splitlines()
    return tuple(line for line in lines if not line.startswith("#"))


PARAGRAPHS = paragraphs()


@dataclass(frozen=True, slots=True)
class Fact:
    """One hidden sentence with its question and answer."""

    sentence: str
    question: str
    value: str


def value(rng: random.Random) -> str:
    """Five digits, two words, or a letter-digit code."""
    u = rng.random()
    if u < 0.5:
        return "".join(rng.choice("0123456789") for _ in range(5))
    if u < 0.8:
        return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2))
    return f"{letters}-{rng.randint(100, 999)}"


def facts(n: int, passkey: bool, rng: random.Random, section: str = "fact") -> list[Fact]:
    """`n` facts about different keys; `section` names the frames of facts that are no pass keys."""
    keys: dict[str, None] = {}
    while len(keys) < n:
        kind = rng.random()
        if kind < 0.6:
            keys[f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"] = None
        elif kind < 0.8:
            keys[rng.choice(NAMES)] = None
        else:
            keys[f"unit {rng.randint(10, 99)}"] = None
    found: list[Fact] = []
    for key in keys:
        scene = {"key": key, "value": value(rng), "thing": rng.choice(THINGS)}
        sentence = GRAMMAR.draw("passkey_fact" if passkey else section, scene, rng)
        question = GRAMMAR.draw("passkey_ask" if passkey else "fact_ask", scene, rng)
        found.append(Fact(sentence, question, str(scene["value"])))
    return found


def filler_line(rng: random.Random) -> str | int:
    """A grammar sentence, or the index of a natural paragraph (so that callers may cache its encoding)."""
    if rng.random() < 0.6:
        return int(rng.random() * len(PARAGRAPHS))
    return GRAMMAR.draw("filler", {}, rng)


def places(n_lines: int, n_facts: int, rng: random.Random) -> list[int]:
    """Sorted line numbers before which facts stand."""
    return sorted(rng.randint(0, n_lines) for _ in range(n_facts))
