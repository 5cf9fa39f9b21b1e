"""One prompt inside the prefill service, and the only place where its state may change.

    waiting ── start ──> running ── token ──> sending ── release ──> done
       └──────── abort ─────┴──────── abort ─────┴──> aborted

`start`: pages and a state slot are taken, tokens found in the cache are skipped, the first chunk is planned. `token`:
the first output token is drawn, the caches are complete and pinned until the handoff lets go of them. Whoever asks for
a change that is not in the table has a bug, so it raises. Pure: no clock, no tensors, no network.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from prefill_svc.core.checkpoints import NO_SLOT
from prefill_svc.core.prefix_cache import Holding, Prompt


class State(Enum):
    """Where a prompt is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SENDING = "sending"
    DONE = "done"
    ABORTED = "aborted"


class Event(Enum):
    """What can happen to a prompt."""

    START = "start"
    TOKEN = "token"
    RELEASE = "release"
    ABORT = "abort"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.START): State.RUNNING,
    (State.RUNNING, Event.TOKEN): State.SENDING,
    (State.SENDING, Event.RELEASE): State.DONE,
    (State.WAITING, Event.ABORT): State.ABORTED,
    (State.RUNNING, Event.ABORT): State.ABORTED,
    (State.SENDING, Event.ABORT): State.ABORTED,
}


@dataclass(slots=True)
class PrefillRequest:
    """A prompt as the scheduler sees it. Only the scheduler writes to it.

    planned: tokens that plans already cover, found ones included; runs ahead of what is acknowledged. While the prompt
      waits: what it would find in the cache now.
    holding: pages and slots, from the start on; from its arrival if is_adopted: then they are somebody else's to give
      back.
    last_step: newest plan that served it, or the newest plan at its arrival.
    """

    key: int
    epoch: int
    prompt: Prompt
    arrived_s: float
    last_step: int
    state: State = State.WAITING
    planned: int = 0
    started_s: float = 0.0
    holding: Holding | None = None
    is_adopted: bool = False

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self.prompt.length

    @property
    def pages(self) -> tuple[int, ...]:
        """All its pages in order, none before the start."""
        return () if self.holding is None else self.holding.pages

    @property
    def slot(self) -> int:
        """The state slot its chunks write, -1 before the start."""
        return NO_SLOT if self.holding is None else self.holding.tenant.live

    @property
    def hit_tokens(self) -> int:
        """Tokens that were found in the cache."""
        return 0 if self.holding is None else self.holding.start

    @property
    def is_held(self) -> bool:
        """Whether its state must be filed before it may go on."""
        return self.holding is not None and self.holding.tenant.hold_end > 0

    @property
    def remaining(self) -> int:
        """Prompt tokens that no plan covers yet."""
        return self.prompt_len - self.planned

    def on(self, event: Event) -> None:
        """Change state. Raises AssertionError when the event is impossible in this state."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise AssertionError(
                f"request {self.key}: event {event.value!r} is impossible in state {self.state.value!r}"
            )
        self.state = after
