"""One step of the decode service as the front means it, and what the ranks say about it. Values only."""

from __future__ import annotations

from typing import NamedTuple

from decode_svc.request import DecodeRequest
from k3.cache.slots import Slot
from k3.types import TokenEvent


class RowState(NamedTuple):
    """A row as the last result left it: what every stage overwrites its row table with before the step.

    base: tokens in the caches, the position of the anchor. read_column: group token whose KDA state is the committed
    one, -1 before the first group. drafts: of the group that begins.
    """

    base: int
    anchor: int
    read_column: int
    drafts: tuple[int, ...]

    @classmethod
    def of(cls, request: DecodeRequest) -> RowState:
        """Of a request that no plan in flight names."""
        return cls(request.base, request.outputs[-1].id, request.read_column, request.next_drafts)


class RowStep(NamedTuple):
    """One verify group of a plan. base_bound: the anchor's position if every step in flight emits all it can.

    draft_len: drafts that are checked. state: over stages only. opens: nothing is checked yet, the step proposes the
    first drafts of a row that it opens.
    """

    request: DecodeRequest
    row: Slot
    base_bound: int
    draft_len: int = 0
    state: RowState | None = None
    opens: bool = False

    @property
    def most(self) -> int:
        """Tokens that it can add."""
        return 1 + self.draft_len


class Plan(NamedTuple):
    """One step. Closed rows come first, then opened ones.

    no_drafts: nothing is proposed, neither for opened rows nor for the next step.
    """

    step_id: int
    closed: tuple[Slot, ...]
    opened: tuple[DecodeRequest, ...]
    rows: tuple[RowStep, ...]
    group_len: int
    no_drafts: bool = False


class Emitted(NamedTuple):
    """What a step says about one row. confidence: of the drafts proposed for its next group, as the head gives it.

    drafts: those drafts, over stages only.
    """

    row: int
    epoch: int
    tokens: tuple[TokenEvent, ...]
    n_drafts: int = 0
    confidence: tuple[float, ...] = ()
    drafts: tuple[int, ...] = ()
