"""One `Generate` call inside the process: `Caller` holds its request and what it still has to be told.

The outbox is bounded by the request itself: at most max_tokens tokens, one failure per candidate, one end. Whoever
decides something pushes it; `service.py` alone takes it out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from decode_svc.emission import Kept, usage
from decode_svc.request import DecodeRequest
from k3.errors import K3Error
from k3.types import FinishReason, Speculation, StageTimes, TokenEvent, Usage


@dataclass(frozen=True, slots=True)
class Admitted:
    """The worst case is reserved."""

    queue_s: float


@dataclass(frozen=True, slots=True)
class CandidateFailed:
    """A candidate failed; decode goes on with the next one. reason: stable and short."""

    instance_id: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one step, in order, and of the figures at the end those that callers want who do not wait for it."""

    tokens: tuple[TokenEvent, ...]
    cached_tokens: int = 0
    speculation: Speculation | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The regular end."""

    reason: FinishReason
    stop_token_id: int | None
    usage: Usage
    times: StageTimes
    prefill_instance_id: str
    speculation: Speculation | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The end by a fault."""

    error: K3Error


Event = Admitted | CandidateFailed | Tokens | Finished | Failed


@dataclass(eq=False, slots=True)
class Caller:
    """A request and its caller. Times are the loop's, None until they happen."""

    request: DecodeRequest
    prefill_instance_id: str = ""
    cached_tokens: int = 0
    opened_s: float | None = None  # the successful candidate's stream
    first_token_s: float | None = None
    filled_s: float | None = None
    outcome: str = "aborted"  # finish reason or error code, once the end was told
    is_over: bool = False
    is_admitted: bool = False
    _outbox: deque[Event] = field(default_factory=deque[Event])
    _ready: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, event: Event) -> None:
        """Tell the caller; nothing is told after the end."""
        if self.is_over:
            return
        match event:
            case Finished():
                self.is_over, self.outcome = True, event.reason.value
            case Failed(error):
                self.is_over, self.outcome = True, error.code
            case _:
                pass
        self._outbox.append(event)
        self._ready.set()

    @property
    def is_told(self) -> bool:
        """Whether every event was taken out."""
        return not self._outbox

    async def next(self) -> Event:
        """The next event; call it until `Finished` or `Failed`. The caller's deadline bounds the wait."""
        while not self._outbox:
            self._ready.clear()
            await self._ready.wait()
        return self._outbox.popleft()

    def admitted(self) -> None:
        """Push the admission; a second one, after a failed candidate, is nobody's news."""
        if not self.is_admitted:
            self.is_admitted = True
            self.push(Admitted(self.request.wait_s or 0.0))

    def tell(self, kept: Kept, now: float) -> None:
        """Push tokens that count, and the end if they are the last."""
        if kept.tokens:
            drafts = self.request.drafts.total
            self.push(Tokens(kept.tokens, self._usage().cached_tokens, drafts))
        if kept.finish is not None:
            self.push(self._finished(kept.finish, kept.stop_token_id, now))

    def fail(self, error: K3Error) -> None:
        """Push the end by a fault."""
        self.push(Failed(error))

    def _usage(self) -> Usage:
        spec = self.request.spec
        n_output = len(self.request.outputs)
        return usage(len(spec.prompt), spec.output_prefix_len, n_output, self.cached_tokens)

    def _finished(self, reason: FinishReason, stop_id: int | None, now: float) -> Finished:
        return Finished(
            reason,
            stop_id,
            self._usage(),
            self.times(now),
            self.prefill_instance_id,
            self.request.drafts.total,
        )

    def times(self, now: float) -> StageTimes:
        """Where the time went, seconds; stages that were not reached are 0."""
        opened = now if self.opened_s is None else self.opened_s
        first = now if self.first_token_s is None else self.first_token_s
        filled = now if self.filled_s is None else self.filled_s
        queue_s = self.request.wait_s or 0.0
        return StageTimes(queue_s, first - opened, max(0.0, filled - first), now - filled)
