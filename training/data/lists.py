"""Copying and small list tasks: sort, reverse, count, n-th, smallest, largest, look-up."""

import random
from dataclasses import dataclass

from training.data.words import ADJECTIVES, DAYS, ITEMS, NAMES, NOUNS

_WORDS = sorted({*ADJECTIVES, *NOUNS, *(plural for plural, _ in ITEMS)})
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


@dataclass(frozen=True, slots=True)
class Task:
    """A question and its response."""

    question: str
    response: str


def copy(rng: random.Random) -> Task:
    """Repeat 2 to 40 words, numbers or codes."""
    n = rng.randint(2, 12) if rng.random() < 0.5 else rng.randint(2, 40)
    kind = rng.random()
    if kind < 0.6:
        parts = [rng.choice(_WORDS) for _ in range(n)]
    elif kind < 0.8:
        parts = [str(rng.randint(0, 999)) for _ in range(n)]
    elif kind < 0.9:
        parts = [rng.choice((rng.choice(_WORDS), str(rng.randint(0, 999)))) for _ in range(n)]
    else:
        parts = [
            f"{rng.choice('ABCDEFGHKLMNPRSTXYZ')}{rng.randint(10, 99)}" for _ in range(min(n, 20))
        ]
    text = " ".join(parts)
    frame = rng.choice(
        (
            "Copy this text: {}",
            "Repeat exactly: {}",
            "Say this again: {}",
            "Write the same text: {}",
        )
    )
    return Task(frame.format(text), text)


def _numbers(rng: random.Random, low: int, high: int) -> list[int]:
    top = rng.choice((20, 99, 999))
    return rng.sample(range(1, top + 1), rng.randint(low, high))


def _words(rng: random.Random, low: int, high: int) -> list[str]:
    return rng.sample(_WORDS, rng.randint(low, high))


def listing(rng: random.Random) -> Task:
    """One small list task."""
    kind = rng.choice(
        ("sort", "sort_down", "reverse", "count", "nth", "last", "min", "max", "lookup", "alphabet")
    )
    match kind:
        case "sort" | "sort_down":
            numbers = _numbers(rng, 3, 8)
            up = kind == "sort"
            frames = (
                ("Sort these numbers: {}", "Put in order, smallest first: {}")
                if up
                else ("Sort from largest to smallest: {}", "Put in order, largest first: {}")
            )
            ordered = sorted(numbers, reverse=not up)
            return Task(rng.choice(frames).format(_join(numbers)), _join(ordered))
        case "reverse":
            parts = _words(rng, 3, 9) if rng.random() < 0.6 else _numbers(rng, 3, 9)
            frame = rng.choice(("Reverse this list: {}", "Say it backwards: {}"))
            return Task(frame.format(_join(parts)), _join(parts[::-1]))
        case "count":
            parts = _words(rng, 2, 12)
            frame = rng.choice(("Count the words: {}", "How many words are in this list: {}?"))
            return Task(frame.format(_join(parts)), str(len(parts)))
        case "nth":
            parts = _words(rng, 6, 9)
            at = rng.randrange(6)
            frame = rng.choice(("What is the {} word of this list: {}?", "Give the {} word: {}"))
            return Task(frame.format(_ORDINALS[at], _join(parts)), parts[at])
        case "last":
            parts = _words(rng, 3, 9)
            return Task(f"What is the last word of this list: {_join(parts)}?", parts[-1])
        case "min" | "max":
            numbers = _numbers(rng, 3, 8)
            name, best = ("smallest", min(numbers)) if kind == "min" else ("largest", max(numbers))
            return Task(f"What is the {name} of these numbers: {_join(numbers)}?", str(best))
        case "alphabet":
            parts = rng.sample(NAMES, rng.randint(2, 5))
            return Task(f"Sort these names by the alphabet: {_join(parts)}", _join(sorted(parts)))
        case _:
            keys = rng.sample(NAMES if rng.random() < 0.5 else DAYS, rng.randint(3, 7))
            values = (
                [str(v) for v in _numbers(rng, 7, 7)] if rng.random() < 0.6 else _words(rng, 7, 7)
            )
            table = ", ".join(f"{k}: {v}" for k, v in zip(keys, values, strict=False))
            at = rng.randrange(len(keys))
            frame = rng.choice(("Table: {}. What belongs to {}?", "Given {}, look up {}."))
            return Task(frame.format(table, keys[at]), values[at])


def _join(parts: list[int] | list[str] | list[int | str]) -> str:
    return ", ".join(str(part) for part in parts)
