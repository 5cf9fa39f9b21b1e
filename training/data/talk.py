"""Short chat (fixed answers of chat.txt) and open-ended continuation of natural text."""

import random
from dataclasses import dataclass
from pathlib import Path

from training.data.grammar import Grammar, Sequence, parse
from training.data.recall import PARAGRAPHS

_EMPTY = Grammar({})


@dataclass(frozen=True, slots=True)
class Talk:
    """Wordings of one question and its answer."""

    questions: tuple[Sequence, ...]
    answer: str


def read_talks(path: Path) -> tuple[Talk, ...]:
    """Blocks of question lines closed by a `> answer` line."""
    talks: list[Talk] = []
    questions: list[Sequence] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("> "):
            talks.append(Talk(tuple(questions), line[2:]))
            questions = []
        elif line and not line.startswith("#"):
            questions.append(parse(line))
    return tuple(talks)


TALKS = read_talks(Path(__file__).parent / "chat.txt")


def chat(rng: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    talk = rng.choice(TALKS)
    frame = rng.choice(talk.questions)
    question = _EMPTY.fill(frame, {}, rng)
    polite = rng.random()
    if polite < 0.1:
        question = f"Please answer: {question}"
    elif polite < 0.2:
        question = f"{question} Be brief."
    return question, talk.answer


def continuation(rng: random.Random, paragraphs: tuple[str, ...] = PARAGRAPHS) -> tuple[str, str]:
    """The beginning of a paragraph and the rest of it."""
    words = rng.choice(paragraphs).split()
    cut = rng.randint(3, max(4, len(words) // 2))
    return "Continue: " + " ".join(words[:cut]), " ".join(words[cut:]) or "."
