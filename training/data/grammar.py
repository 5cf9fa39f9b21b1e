"""Templates with alternatives: `[one|other]`, slots `{name}`, fragments `<name>`.

A template is parsed once into a tree. `Grammar` reads a file of `@ section` blocks. The same tree serves
for drawing (training), counting and matching (the tests that held-out sentences cannot be drawn).
Tree nodes: str = literal, Slot, Fragment, Choice; a sequence is a tuple of nodes.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SENTENCE_START = re.compile(r"(^|[.?!] )([a-z])")


@dataclass(frozen=True, slots=True)
class Slot:
    """A place filled from the scene, such as a name or a number."""

    name: str


@dataclass(frozen=True, slots=True)
class Fragment:
    """A reference to another section of the same grammar."""

    name: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several sequences."""

    options: tuple["Sequence", ...]


Node = str | Slot | Fragment | Choice
Sequence = tuple[Node, ...]


def parse(text: str) -> Sequence:
    """Tree of a template; raises ValueError on unbalanced brackets."""
    node, end = _sequence(text, 0, "")
    if end != len(text):
        raise ValueError(f"unexpected {text[end]!r} at {end} in template {text!r}")
    return node


def _sequence(text: str, at: int, closers: str) -> tuple[Sequence, int]:
    nodes: list[Node] = []
    literal = ""
    while at < len(text) and text[at] not in closers:
        char = text[at]
        if char not in "[{<":
            literal, at = literal + char, at + 1
            continue
        if literal:
            nodes.append(literal)
            literal = ""
        if char == "[":
            choice, at = _choice(text, at + 1)
            nodes.append(choice)
        else:
            end = text.index("}" if char == "{" else ">", at)
            name = text[at + 1 : end]
            nodes.append(Slot(name) if char == "{" else Fragment(name))
            at = end + 1
    if literal:
        nodes.append(literal)
    return tuple(nodes), at


def _choice(text: str, at: int) -> tuple[Choice, int]:
    options: list[Sequence] = []
    while True:
        option, at = _sequence(text, at, "|]")
        options.append(option)
        if at >= len(text):
            raise ValueError(f"missing ] in template {text!r}")
        at += 1
        if text[at - 1] == "]":
            return Choice(tuple(options)), at


def tidy(text: str) -> str:
    """Single spaces, no space before punctuation, a capital at each sentence start."""
    text = " ".join(text.split()).replace(" .", ".").replace(" ,", ",").replace(" ?", "?")
    return _SENTENCE_START.sub(lambda m: m.group(1) + m.group(2).upper(), text)


@dataclass(frozen=True, slots=True)
class Grammar:
    """Named sections of alternative templates."""

    sections: Mapping[str, tuple[Sequence, ...]]

    @staticmethod
    def read(path: Path) -> "Grammar":
        """Read `@ section` blocks; `#` lines are comments."""
        sections: dict[str, list[Sequence]] = {}
        current: list[Sequence] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("@ "):
                current = sections.setdefault(line[2:].strip(), [])
            elif line and not line.startswith("#"):
                current.append(parse(line))
        return Grammar({name: tuple(frames) for name, frames in sections.items()})

    def draw(self, section: str, scene: Mapping[str, object], rng: random.Random) -> str:
        """One tidy sentence of a section, slots filled from the scene."""
        frames = self.sections[section]
        return self.fill(frames[int(rng.random() * len(frames))], scene, rng)

    def fill(self, frame: Sequence, scene: Mapping[str, object], rng: random.Random) -> str:
        """One tidy text of a parsed template."""
        parts: list[str] = []
        self._emit(frame, scene, rng, parts)
        return tidy("".join(parts))

    def _emit(
        self, nodes: Sequence, scene: Mapping[str, object], rng: random.Random, parts: list[str]
    ) -> None:
        for node in nodes:
            match node:
                case str():
                    parts.append(node)
                case Slot(name):
                    parts.append(str(scene[name]))
                case Choice(options):
                    self._emit(options[int(rng.random() * len(options))], scene, rng, parts)
                case Fragment(name):
                    frames = self.sections[name]
                    self._emit(frames[int(rng.random() * len(frames))], scene, rng, parts)

    def count(self, nodes: Sequence) -> int:
        """How many texts a template has, slots counted once."""
        total = 1
        for node in nodes:
            match node:
                case Choice(options):
                    total *= sum(self.count(option) for option in options)
                case Fragment(name):
                    total *= sum(self.count(frame) for frame in self.sections[name])
                case str() | Slot():
                    pass
        return total

    def pattern(self, nodes: Sequence, slots: Mapping[str, str]) -> str:
        """Regular expression of a template's untidied texts; `slots` gives the expression of each slot."""
        parts: list[str] = []
        for node in nodes:
            match node:
                case str():
                    parts.append(re.escape(node).replace(r"\ ", r"\s*"))
                case Slot(name):
                    parts.append(f"(?:{slots[name]})")
                case Choice(options):
                    parts.append("(?:" + "|".join(self.pattern(o, slots) for o in options) + ")")
                case Fragment(name):
                    frames = self.sections[name]
                    parts.append("(?:" + "|".join(self.pattern(f, slots) for f in frames) + ")")
        return "".join(parts)


def words_of(nodes: Sequence) -> set[str]:
    """Lower-case words of all literals of a template."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case str():
                found.update(re.findall(r"[a-z]+", node.lower()))
            case Choice(options):
                for option in options:
                    found |= words_of(option)
            case Slot() | Fragment():
                pass
    return found
