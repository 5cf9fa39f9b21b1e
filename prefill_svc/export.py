"""What the handoff knows of one request on its way out.

    COMPUTING ── destination ──> OPEN ── every rank sent, token out ──> COMMITTED ── received ──> ENDED
        │                          └──────── abort, loss, failure ─────────┴──> DRAINING ── quiet ──> ENDED
        └── abort, loss, failure, reserve_wait ──────────────────────────────────────────────────────> ENDED

Only `handoff.py` changes an `Export`; the rules are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from k3.errors import K3Error
from k3.v1 import plan_pb2, prefill_pb2
from prefill_svc.peers import Peer


class Phase(Enum):
    """Where an export is; see the drawing above."""

    COMPUTING = "computing"
    OPEN = "open"
    COMMITTED = "committed"
    DRAINING = "draining"
    ENDED = "ended"


class Stream(Protocol):
    """The request's call, seen from here. Both calls return at once."""

    def send(self, response: prefill_pb2.PrefillResponse) -> None:
        """Queue one message for decode."""
        ...

    def finish(self, error: K3Error | None) -> None:
        """End the call, with OK when `error` is None. Idempotent; nothing is sent afterwards."""
        ...


class Prompts(Protocol):
    """What the handoff may do to the scheduler."""

    def abort(self, key: int) -> None:
        """Compute nothing more for the prompt. Idempotent."""
        ...

    def release(self, key: int) -> None:
        """Give back its pages and slot. Idempotent."""
        ...


@dataclass(eq=False, slots=True)
class Export:
    """One request's way out. Tokens: `planned` are covered by plans, `computed` by acknowledged ones."""

    key: int
    peer: Peer
    prompt_len: int
    stream: Stream
    phase: Phase = Phase.COMPUTING
    destination: prefill_pb2.Destination | None = None
    planned: int = 0
    computed: int = 0
    last_step: int = 0
    pages: tuple[int, ...] = ()
    slot: int = 0
    n_copied: int = 0
    prefilled: prefill_pb2.Prefilled | None = None
    prefilled_at: float | None = None
    opened_at: float = 0.0
    committed_at: float | None = None
    sent: dict[int, plan_pb2.TransferSent] = field(default_factory=dict[int, plan_pb2.TransferSent])
    bytes_done: dict[int, int] = field(default_factory=dict[int, int])
    seq: int = 0
    next_heartbeat_at: float = 0.0
    last_echo_at: float = 0.0
    drain_until: float = 0.0
    error: K3Error | None = None

    @property
    def transfer_id(self) -> int:
        """The destination's id. Only with a destination."""
        assert self.destination is not None
        return self.destination.transfer_id

    @property
    def generation(self) -> int:
        """The destination's fence number, 0 without one."""
        return 0 if self.destination is None else self.destination.generation

    @property
    def sends_draft(self) -> bool:
        """Whether draft rows go along: both sides have the drafter, and the destination has a ring."""
        destination = self.destination
        return (
            self.peer.sends_draft and destination is not None and destination.HasField("draft_slot")
        )

    @property
    def total_bytes(self) -> int:
        """Bytes known in place at the receiver."""
        return sum(self.bytes_done.values())

    @property
    def tail_since(self) -> float:
        """When the exposed tail began: at the first token, or at the destination if that came later."""
        assert self.prefilled_at is not None
        return max(self.prefilled_at, self.opened_at)

    @property
    def tail_s(self) -> float | None:
        """Length of the exposed tail, None before the commit."""
        return None if self.committed_at is None else self.committed_at - self.tail_since

    def next_copy(self, page_tokens: int) -> plan_pb2.CopyPages | None:
        """The pages that are complete after the newest plan and were not copied yet, None without any.

        A page is complete when all its tokens are planned, the last one with the end of the prompt.
        """
        is_last = self.planned >= self.prompt_len
        n_complete = len(self.pages) if is_last else self.planned // page_tokens
        if n_complete <= self.n_copied:
            return None
        return plan_pb2.CopyPages(
            transfer_id=self.transfer_id,
            first_page=self.n_copied,
            pages=self.pages[self.n_copied : n_complete],
            after_step=self.last_step,
            last=is_last,
            state_slot=self.slot,
            tokens=min(n_complete * page_tokens, self.prompt_len),
        )

    def commitment(self) -> prefill_pb2.Committed:
        """What `Committed` says once every rank has sent everything."""
        assert self.destination is not None
        return prefill_pb2.Committed(
            transfer_id=self.destination.transfer_id,
            nonce=self.destination.nonce,
            generation=self.destination.generation,
            totals=[total for rank in sorted(self.sent) for total in self.sent[rank].totals],
            draft_valid=self.sends_draft,
            bytes=self.total_bytes,
            tail_s=self.tail_s or 0.0,
        )

    def progress(self) -> prefill_pb2.Progress:
        """The heartbeat."""
        return prefill_pb2.Progress(
            seq=self.seq, computed_tokens=self.computed, bytes_done=self.total_bytes
        )
