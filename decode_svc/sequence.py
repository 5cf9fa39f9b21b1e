"""One numbering and one line of acknowledgements for plans of two kinds: chunks of prompts, and verify groups.

A rank executes all plans in one order and answers each once, so whatever a plan leaves in the caches is there for every
later one, of either kind. Each kind keeps its own count and its own limit of plans in flight. Where both have something
to do they take turns: a token never waits for more than one step of prompts per stage. Pure.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What a plan is made of."""

    CHUNKS = "chunks"
    GROUPS = "groups"


class Turn(NamedTuple):
    """A plan in flight: its kind, and its number among those of the kind."""

    kind: Kind
    step: int


class Sequence:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[int, Turn]] = deque()
        self._newest = 0
        self._last = Kind.CHUNKS

    @property
    def n_in_flight(self) -> int:
        """Plans not acknowledged."""
        return len(self._in_flight)

    @property
    def order(self) -> tuple[Kind, Kind]:
        """Who is asked for the next plan, and who if the first has none."""
        first = Kind.GROUPS if self._last is Kind.CHUNKS else Kind.CHUNKS
        return first, self._last

    def number(self, kind: Kind, step: int) -> int:
        """The number of the next plan, dense from 1."""
        self._newest += 1
        self._last = kind
        self._in_flight.append((self._newest, Turn(kind, step)))
        return self._newest

    def answered(self, number: int) -> Turn:
        """The oldest plan in flight. Raises AssertionError when another one is acknowledged."""
        oldest = self._in_flight[0][0] if self._in_flight else None
        if oldest != number:
            raise AssertionError(f"step {number} acknowledged, the oldest in flight is {oldest}")
        return self._in_flight.popleft()[1]
