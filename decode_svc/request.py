"""One generation inside the decode service and the table of its states.

    queued ── admit ──> admitted ── fill ──> filling ── filled ──> running ── finish ──> finishing ── settle ──> gone

A queued request holds nothing; from `admitted` on it holds a `Reservation` of its worst case. `requeue` takes a
request whose candidate failed back to its old place in the queue, without its reservation. `finishing` means ended
with a plan still in flight that names its row. Everything about transitions lives here; an event that the table does
not list is a bug and raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from k3.cache.slots import Slot
from k3.types import (
    LogprobParams,
    RequestId,
    SamplingParams,
    Speculation,
    StopParams,
    TokenEvent,
)


class State(Enum):
    """Where a request is."""

    QUEUED = "queued"
    ADMITTED = "admitted"
    FILLING = "filling"
    RUNNING = "running"
    FINISHING = "finishing"
    GONE = "gone"


class Event(Enum):
    """What can happen to it."""

    ADMIT = "admit"  # its worst case is reserved
    FILL = "fill"  # a prefill instance may write into the reservation
    REQUEUE = "requeue"  # the candidate failed; the reservation is given up
    FILLED = "filled"  # every byte is in place
    FINISH = "finish"  # ended while running: last token, client gone, deadline
    DROP = "drop"  # ended before it ran
    SETTLE = "settle"  # the last plan that names it is acknowledged


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.QUEUED: {Event.ADMIT: State.ADMITTED, Event.DROP: State.GONE},
    State.ADMITTED: {
        Event.FILL: State.FILLING,
        Event.DROP: State.GONE,
    },
    State.FILLING: {
        Event.FILLED: State.RUNNING,
        Event.REQUEUE: State.QUEUED,
        Event.DROP: State.GONE,
    },
    State.RUNNING: {Event.FINISH: State.FINISHING},
    State.FINISHING: {Event.SETTLE: State.GONE},
    State.GONE: {},
}


@dataclass(frozen=True, slots=True)
class Reservation:
    """The memory of one request, on every rank alike. `row` carries the epoch that plans are fenced with.

    has_ring_of_row: its draft ring is that of the row, else that of the state slot.
    """

    pages: tuple[int, ...]
    state_slot: int
    row: Slot
    has_ring_of_row: bool = False

    @property
    def draft_slot(self) -> int:
        """Its draft ring."""
        return self.row.index if self.has_ring_of_row else self.state_slot


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prefill instance that may compute the prompt."""

    instance_id: str
    address: str


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What the router asked for; never changes.

    output_prefix_len: tokens at the end of `prompt` that are already generated output (after a migration).
    draft_tokens: drafts that a step checks at most; None: as many as there are.
    """

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    logprobs: LogprobParams = field(default_factory=LogprobParams)
    candidates: tuple[Candidate, ...] = ()
    salt: bytes = b""
    attempt: int = 1
    output_prefix_len: int = 0
    draft_tokens: int | None = None


class DraftCount:
    """Speculation of one request so far; steps without drafts do not count."""

    __slots__ = ("_histogram", "_n_drafts", "newest")

    def __init__(self, draft_tokens: int) -> None:
        self._histogram = [0] * (draft_tokens + 1)
        self._n_drafts = 0
        self.newest = (0, 0)  # drafts and accepted ones of the newest step

    def add(self, n_drafts: int, n_accepted: int) -> None:
        """One step."""
        self.newest = (n_drafts, n_accepted)
        if n_drafts:
            self._histogram[n_accepted] += 1
            self._n_drafts += n_drafts

    @property
    def width(self) -> int:
        """Drafts of a full group; 0 in a service that does not speculate."""
        return len(self._histogram) - 1

    @property
    def total(self) -> Speculation | None:
        """Everything counted; None in a service that does not speculate."""
        if len(self._histogram) == 1:
            return None
        return Speculation(tuple(self._histogram), self._n_drafts)


class DecodeRequest:
    """A `RequestSpec` on its way. `key` is its number inside the service; keys grow with arrival."""

    __slots__ = (
        "_state",
        "arrived_s",
        "base",
        "bootstrap",
        "confidence",
        "draft_valid",
        "drafts",
        "has_drafts",
        "key",
        "most_in_flight",
        "next_drafts",
        "outputs",
        "plans_in_flight",
        "read_column",
        "reservation",
        "spec",
        "told",
        "wait_s",
    )

    def __init__(
        self, key: int, spec: RequestSpec, arrived_s: float, draft_tokens: int = 0
    ) -> None:
        self.key = key
        self.spec = spec
        self.arrived_s = arrived_s
        self.wait_s: float | None = None  # seconds in the queue until the first admission
        self.reservation: Reservation | None = None
        self.outputs: list[TokenEvent] = []  # confirmed output tokens, the first one from prefill
        self.base = 0  # confirmed base: position of the anchor
        self.draft_valid = False  # prefill's draft rows are in the ring
        self.bootstrap = ""  # how its drafter started, a label of `SpecMetrics`; empty without one
        self.has_drafts = True  # the newest step that had this row proposed drafts for the next one
        self.confidence: tuple[float, ...] = ()  # calibrated, of each draft; empty while unknown
        self.told: tuple[float, ...] = ()  # as the drafter gave it for the drafts of the next step
        self.drafts = DraftCount(draft_tokens)
        self.plans_in_flight = 0
        self.most_in_flight = 0  # tokens that these plans can add
        # Over stages the front keeps what the device's row table keeps otherwise.
        self.read_column = (
            -1
        )  # group token whose state is the committed one; -1 before the first group
        self.next_drafts: tuple[int, ...] = ()
        self._state = State.QUEUED

    def __repr__(self) -> str:
        return f"DecodeRequest({self.key}, {self.spec.request_id}, {self._state.value})"

    @property
    def state(self) -> State:
        """Where the request is."""
        return self._state

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.spec.prompt)

    @property
    def held(self) -> Reservation:
        """The reservation of a request that must have one."""
        assert self.reservation is not None, f"{self!r} holds nothing"
        return self.reservation

    def apply(self, event: Event) -> None:
        """Change state. Raises AssertionError for an event that is not in the table."""
        target = TRANSITIONS[self._state].get(event)
        if target is None:
            raise AssertionError(f"{self!r}: event {event.value!r} is not allowed in this state")
        self._state = target
