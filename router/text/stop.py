"""Stop strings: one automaton over the emitted text of a choice.

The automaton (Aho and Corasick) tells after each character how long a suffix of the text is a proper prefix of some
stop string. Exactly that suffix is held back, nothing more. A match is taken at its earliest end; of several ending
there, the longest wins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    depth: int
    children: dict[str, int] = field(default_factory=dict[str, int])
    fail: int = 0
    match: str | None = None  # longest stop string ending here


class StopAutomaton:
    """The stop strings of a request, compiled once and shared by its choices. Immutable."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("stop strings must not be empty")
        self._nodes = [_Node(0)]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        at = 0
        for char in stop:
            children = self._nodes[at].children
            if char not in children:
                self._nodes.append(_Node(self._nodes[at].depth + 1))
                children[char] = len(self._nodes) - 1
            at = children[char]
        self._nodes[at].match = stop

    def _link(self) -> None:
        """Breadth first: the fail link of a node is the longest proper suffix that is also in the trie."""
        queue = deque(self._nodes[0].children.values())
        while queue:
            node = self._nodes[queue.popleft()]
            for char, child_at in node.children.items():
                child = self._nodes[child_at]
                child.fail = self.step(node.fail, char)
                if child.match is None:
                    child.match = self._nodes[child.fail].match
                queue.append(child_at)

    def step(self, state: int, char: str) -> int:
        """Next state; 0 is the start."""
        while state and char not in self._nodes[state].children:
            state = self._nodes[state].fail
        return self._nodes[state].children.get(char, 0)

    def held(self, state: int) -> int:
        """Length of the suffix that may still become a match."""
        return self._nodes[state].depth

    def match(self, state: int) -> str | None:
        """The stop string ending here, the longest when several do."""
        return self._nodes[state].match


class StopStream:
    """Searches one choice's text. `matched` is the stop string once found; nothing is emitted after it."""

    def __init__(self, automaton: StopAutomaton, *, include_stop: bool = False) -> None:
        self._automaton = automaton
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that can be emitted now; the rest is held back or, after a match, dropped."""
        if self.matched is not None:
            return ""
        whole = self._held + text
        for index, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._automaton.step(self._state, char)
            matched = self._automaton.match(self._state)
            if matched is not None:
                self.matched, self._held = matched, ""
                return whole[: index if self._include_stop else index - len(matched)]
        cut = len(whole) - self._automaton.held(self._state)
        self._held = whole[cut:]
        return whole[:cut]

    def flush(self) -> str:
        """The text held back, at the end of the stream; the search starts anew."""
        held, self._held, self._state = self._held, "", 0
        return held
