"""Admission and row choice of the decode service: pure, no clock, no sockets, no tensors.

Admission reserves the worst case of a request (pages, state slot, row), strictly first in first out: a request that
does not fit blocks those behind it, and nothing running is ever evicted. `plan` returns the next step, at most `depth`
of them unacknowledged; `advance` absorbs the one acknowledgement of each, in order.

The device's row table is the truth of a running request. The host only knows `base` as of the last acknowledged step
and plans with upper bounds: every step in flight may emit a whole group. Memory of an ended request is released when
the last plan that names its row is acknowledged. Golden: helix/admission.json.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from decode_svc.capacity import worst_len
from decode_svc.draft_policy import DraftPolicy
from decode_svc.emission import Kept, keep
from decode_svc.ledger import Ledger
from decode_svc.memory import Hold, Memory, Place
from decode_svc.plan import Emitted, Plan, RowState, RowStep
from decode_svc.request import DecodeRequest, Event, RequestSpec, Reservation, State
from k3.cache.slots import Slot, SlotPool
from k3.errors import QueueFull, RequestRejected
from k3.types import TokenEvent


class Progress(NamedTuple):
    """Tokens a running request gained, and how it ends if it does."""

    request: DecodeRequest
    kept: Kept


@dataclass(frozen=True, slots=True)
class Limits:
    """Fixed numbers of the service. is_staged: over stages, a row is in one of the `depth` steps in flight."""

    max_queue: int
    max_model_len: int
    depth: int = 1
    draft_tokens: int = 0
    is_staged: bool = False

    @property
    def row_depth(self) -> int:
        """Steps in flight that may name one row (`depth.py`)."""
        return 1 if self.is_staged else self.depth

    @property
    def group_len(self) -> int:
        """G: tokens of the widest verify group."""
        return 1 + self.draft_tokens


class DecodeScheduler:
    """See the module's docstring. Memory and rows are the scheduler's own; callers only read their counts."""

    def __init__(
        self,
        ledger: Ledger,
        limits: Limits,
        *,
        memory: Memory,
        rows: SlotPool,
        policy: DraftPolicy | None = None,
    ) -> None:
        """policy: how many drafts steps check; without one all of them."""
        self.policy = policy or DraftPolicy(limits.draft_tokens)
        self.ledger = ledger
        self.limits = limits
        self.memory = memory
        self.rows = rows
        self._queue: list[DecodeRequest] = []  # ascending keys
        self._filling: dict[int, DecodeRequest] = {}  # admitted or filling
        self._running: dict[int, DecodeRequest] = {}
        self._finishing: dict[int, DecodeRequest] = {}
        self._to_open: list[DecodeRequest] = []
        self._to_close: list[Slot] = []
        self._in_flight: deque[Plan] = deque()
        self._next_key = 1
        self._next_step = 1

    # ---------------------------------------------------------------- arrival and admission

    def submit(self, spec: RequestSpec, now: float) -> DecodeRequest:
        """Take a request into the queue; `admit` lets it in.

        Raises RequestRejected for one that can never be served here, QueueFull when the queue is full.
        """
        self._check(spec)
        request = DecodeRequest(self._next_key, spec, now, self.limits.draft_tokens)
        if len(self._queue) >= self.limits.max_queue and (self._queue or not self._fits(request)):
            raise QueueFull(
                f"{len(self._queue)} requests wait already, schedule.max_queue={self.limits.max_queue}; "
                "try again later or at another instance"
            )
        self._next_key += 1
        self._queue.append(request)
        return request

    def admit(self, now: float) -> list[DecodeRequest]:
        """Reserve memory for requests at the head of the queue, as many as fit."""
        admitted: list[DecodeRequest] = []
        while self._queue and self._fits(self._queue[0]):
            request = self._queue.pop(0)
            request.apply(Event.ADMIT)
            place = self.memory.take(request, self._pages_needed(request.spec))
            request.reservation = Reservation(
                *place, self.rows.allocate(), self.memory.has_rings_of_rows
            )
            if request.wait_s is None:
                request.wait_s = now - request.arrived_s
            self._filling[request.key] = request
            admitted.append(request)
        return admitted

    def head(self, n: int) -> list[DecodeRequest]:
        """The first `n` requests of the queue."""
        return self._queue[:n]

    def _check(self, spec: RequestSpec) -> None:
        n, m, limit = len(spec.prompt), spec.stop.max_tokens, self.limits.max_model_len
        if n < 1:
            raise RequestRejected(
                "the prompt is empty; it needs at least one token", param="token_ids"
            )
        if m < 1:
            raise RequestRejected(f"max_tokens={m}: must be at least 1", param="stop.max_tokens")
        if n + m > limit:
            raise RequestRejected(
                f"prompt of {n} tokens and max_tokens={m} exceed max_model_len={limit}; shorten one of them",
                code="context_length_exceeded",
                param="stop.max_tokens",
            )
        needed, total = self._pages_needed(spec), self.memory.n_pages
        if needed > total:
            raise RequestRejected(
                f"prompt of {n} tokens and max_tokens={m} need {needed} pages, this instance has {total}; "
                "shorten one of them or raise cache.pages",
                code="context_length_exceeded",
                param="stop.max_tokens",
            )

    def _pages_needed(self, spec: RequestSpec) -> int:
        limits = self.limits
        return self.ledger.pages(
            worst_len(
                len(spec.prompt), spec.stop.max_tokens, limits.draft_tokens, limits.row_depth - 1
            )
        )

    def _fits(self, request: DecodeRequest) -> bool:
        return self.rows.available > 0 and self.memory.fits(
            request, self._pages_needed(request.spec)
        )

    # ---------------------------------------------------------------- filling

    def fill(self, request: DecodeRequest) -> None:
        """The reservation is about to be written, by a prefill instance that learns it or by chunks computed here."""
        request.apply(Event.FILL)

    def first_token(self, request: DecodeRequest, token: TokenEvent) -> Kept:
        """The token prefill drew. A request it ends never gets a row: `drop` it."""
        kept = keep(request.spec.stop, 0, (token,))
        request.outputs.extend(kept.tokens)
        return kept

    def filled(self, request: DecodeRequest) -> None:
        """Every byte is in place; the request joins the next plan."""
        request.apply(Event.FILLED)
        assert request.outputs, f"{request!r} has no first token"
        del self._filling[request.key]
        request.base = request.prompt_len
        self._running[request.key] = request
        self._to_open.append(request)

    def moved(self, request: DecodeRequest, place: Place) -> None:
        """The caches lie elsewhere than they were reserved: found pages were shared, states were filed."""
        request.reservation = replace(request.held, pages=place.pages, state_slot=place.state_slot)

    def requeue(self, request: DecodeRequest) -> Hold:
        """The candidate failed: give the reservation up, wait at the old place in the queue; returns the quarantine."""
        request.apply(Event.REQUEUE)
        del self._filling[request.key]
        hold = self._quarantine(request)
        behind = next(
            (i for i, r in enumerate(self._queue) if r.key > request.key), len(self._queue)
        )
        self._queue.insert(behind, request)
        return hold

    def drop(self, request: DecodeRequest) -> Hold | None:
        """End a request that does not run. Returns memory that must stay in quarantine until `settle`."""
        state = request.state
        request.apply(Event.DROP)
        match state:
            case State.QUEUED:
                self._queue.remove(request)
                return None
            case _:
                del self._filling[request.key]
        if state is State.ADMITTED or not self.memory.has_outside_writers:
            self._release(request)
            return None
        return self._quarantine(request)

    def settle(self, hold: Hold) -> None:
        """No write can land in this memory any more."""
        self.memory.settle(hold)

    def _quarantine(self, request: DecodeRequest) -> Hold:
        self.rows.release(request.held.row.index)  # nothing is ever written into a row from outside
        request.reservation = None
        return self.memory.quarantine(request)

    # ---------------------------------------------------------------- steps

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to run or `depth` steps are in flight."""
        if len(self._in_flight) >= self.limits.depth:
            return None
        chosen = self._chosen()
        if all(map(self._may_be_done, chosen)):
            return None
        width = self.policy.width(chosen)
        rows = tuple(self._row_step(r, width) for r in chosen)
        opened = tuple(r for r in self._to_open if r in chosen)
        plan = Plan(
            self._next_step,
            tuple(self._to_close),
            opened,
            rows,
            max(step.most for step in rows),
            width is None,
        )
        self._next_step += 1
        self._to_close.clear()
        self._to_open = [r for r in self._to_open if r not in opened]
        for step in rows:
            request = step.request
            if self.limits.is_staged:  # those that wait longest come first
                self._running[request.key] = self._running.pop(request.key)
            request.plans_in_flight += 1
            request.most_in_flight += step.most
            request.has_drafts = width is not None
        self._in_flight.append(plan)
        return plan

    def _chosen(self) -> list[DecodeRequest]:
        """Who takes part in the next step; over stages an equal share of all, so that every stage has work."""
        ready = [r for r in self._running.values() if self._may_run(r)]
        if self.limits.is_staged:
            del ready[-(-len(self._running) // self.limits.depth) :]
        return ready

    def _may_run(self, request: DecodeRequest) -> bool:
        """Whether another step can add a kept token: each step in flight emits at least one."""
        in_flight = request.plans_in_flight
        wants_more = len(request.outputs) + in_flight < request.spec.stop.max_tokens
        return wants_more and in_flight < self.limits.row_depth

    def _may_be_done(self, request: DecodeRequest) -> bool:
        """Whether the steps in flight may add the last token.

        A step for such requests alone is likely to be for nobody; it waits for an answer.
        """
        most = len(request.outputs) + request.most_in_flight
        return most >= request.spec.stop.max_tokens

    def _row_step(self, request: DecodeRequest, width: int | None) -> RowStep:
        group = self.limits.group_len
        bound = request.base + request.plans_in_flight * group
        held = request.held
        needed = self.ledger.pages(bound + group)
        assert needed <= len(held.pages), (
            f"{request!r}: {needed} pages needed, {len(held.pages)} reserved"
        )
        most = (width or 0) if request.has_drafts else 0
        if request.spec.draft_tokens is not None:
            most = min(most, request.spec.draft_tokens)
        if not self.limits.is_staged:
            return RowStep(request, held.row, bound, most)
        opens = width is not None and self.limits.draft_tokens > 0 and request in self._to_open
        most = min(most, len(request.next_drafts))
        return RowStep(request, held.row, bound, most, RowState.of(request), opens)

    def advance(self, step_id: int, emitted: Sequence[Emitted]) -> list[Progress]:
        """Absorb the acknowledgement of the oldest plan in flight.

        emitted: one entry per row, in the plan's order. Raises AssertionError when it does not match the plan.
        """
        plan = self._in_flight.popleft()
        named = [(step.row.index, step.row.epoch) for step in plan.rows]
        answered = [(e.row, e.epoch) for e in emitted]
        assert (plan.step_id, named) == (step_id, answered), (
            f"step {step_id} answers rows {answered}; the oldest plan is step {plan.step_id} of rows {named}"
        )
        progress: list[Progress] = []
        for step, result in zip(plan.rows, emitted, strict=True):
            request = step.request
            request.plans_in_flight -= 1
            request.most_in_flight -= step.most
            request.next_drafts = result.drafts
            if request.state is State.RUNNING and not step.opens:
                progress.append(self._absorb(request, result))
            if request.state is State.FINISHING and request.plans_in_flight == 0:
                self._settle_row(request)
        return progress

    def _absorb(self, request: DecodeRequest, result: Emitted) -> Progress:
        assert 1 <= len(result.tokens) <= self.limits.group_len, (
            f"{request!r}: a step emitted {len(result.tokens)} tokens, group_len={self.limits.group_len}"
        )
        kept = keep(request.spec.stop, len(request.outputs), result.tokens)
        request.outputs.extend(kept.tokens)
        request.base += len(result.tokens)
        request.read_column = len(result.tokens) - 1
        request.drafts.add(result.n_drafts, len(result.tokens) - 1)
        self.policy.heard(request, result.n_drafts, len(result.tokens) - 1, result.confidence)
        if kept.finish is not None:
            self._finish(request)
        return Progress(request, kept)

    def abort(self, request: DecodeRequest) -> None:
        """End a running request; its row leaves once no plan in flight names it. Idempotent from `finishing` on."""
        if request.state is State.RUNNING:
            self._finish(request)
            if request.plans_in_flight == 0:
                self._settle_row(request)

    def _finish(self, request: DecodeRequest) -> None:
        request.apply(Event.FINISH)
        self.policy.finished(request)
        del self._running[request.key]
        self._finishing[request.key] = request

    def _settle_row(self, request: DecodeRequest) -> None:
        request.apply(Event.SETTLE)
        del self._finishing[request.key]
        if request in self._to_open:
            self._to_open.remove(request)  # it never was in a plan
        else:
            self._to_close.append(request.held.row)
        self._release(request)

    def _release(self, request: DecodeRequest) -> None:
        self.rows.release(request.held.row.index)
        request.reservation = None
        self.memory.release(request)

    # ---------------------------------------------------------------- what others may know

    @property
    def n_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def n_holding(self) -> int:
        """Requests that hold memory: admitted, filling, running, finishing."""
        return len(self._filling) + len(self._running) + len(self._finishing)

    @property
    def n_running(self) -> int:
        """Requests that have a row in the plans."""
        return len(self._running)

    def rank_tokens(self) -> list[int]:
        """Tokens in the caches of each context-parallel rank, as far as confirmed."""
        lengths = [r.base for held in (self._running, self._finishing) for r in held.values()]
        ranks = range(self.ledger.cp)
        return [sum(self.ledger.local_len(n, rank) for n in lengths) for rank in ranks]

    def open_requests(self) -> list[DecodeRequest]:
        """Every request that is not gone, oldest first."""
        groups = (
            self._queue,
            *(d.values() for d in (self._filling, self._running, self._finishing)),
        )
        return sorted((r for group in groups for r in group), key=lambda r: r.key)
