"""One request's way through its candidates: `Filling`, a task from its admission (or before) to complete caches.

Before the first token is out a failed candidate is followed by the next one, with the same reservation when the
candidate said that it posted nothing, else with a fresh one. After the first token a failure ends the request.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from decode_svc import wire
from decode_svc.caller import Caller, CandidateFailed
from decode_svc.intake.attempt import Attempt, Hooks, Reserved
from decode_svc.intake.quarantine import Quarantine
from decode_svc.intake.source import Pairs, PrefillLost, PrefillSource, is_allowed
from decode_svc.request import Candidate, State
from decode_svc.scheduler import DecodeScheduler
from k3.config.tree import TransferConfig
from k3.errors import (
    DeadlineExceeded,
    GroupFailed,
    K3Error,
    LayoutMismatch,
    QueueFull,
    ReconnectRequired,
    RequestRejected,
    TransferError,
    Unavailable,
)
from k3.telemetry.metrics import DecodeMetrics
from k3.v1 import prefill_pb2

BACKOFF_S = 0.05
MAX_DEATHS = 2  # a request under which two instances died is not tried on a third one
MAX_RECONNECTS = 2  # per candidate

log = logging.getLogger("k3.decode.intake")


@dataclass(frozen=True, slots=True)
class Identity:
    """What this instance says of itself when it opens a stream."""

    instance_id: str
    layout_fingerprint: str
    draft_fingerprint: str
    n_ranks: int


@dataclass(frozen=True, slots=True)
class IntakeConfig:
    """Settings of the intake. allowed: patterns of addresses that may be dialled."""

    times: TransferConfig
    allowed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """What every filling works with. is_open: cleared while the transfer agents are rebuilt.

    changed: called whenever memory or rows may have become available or a request may run.
    """

    identity: Identity
    config: IntakeConfig
    scheduler: DecodeScheduler
    source: PrefillSource
    pairs: Pairs
    quarantine: Quarantine
    hooks: Hooks
    is_open: asyncio.Event
    changed: Callable[[], None]
    metrics: DecodeMetrics
    rng: random.Random


class Filling:
    """One request's way through its candidates."""

    def __init__(self, parts: Parts, caller: Caller) -> None:
        self.parts = parts
        self.caller = caller
        self.request = caller.request
        self.generation = 0
        self.attempt: Attempt | None = None
        self.task: asyncio.Task[None] | None = None
        self._admitted = asyncio.Event()
        self._reason = prefill_pb2.ABORT_REASON_REVOKED
        self._failures: list[K3Error] = []
        self._deaths = 0

    def admitted(self) -> None:
        """The request holds a reservation."""
        self._admitted.set()
        if self.attempt is not None:
            self.attempt.deliver(Reserved())

    def abort(self, reason: prefill_pb2.AbortReason) -> None:
        """End it."""
        self._reason = reason
        if self.task is not None:
            self.task.cancel()

    def leave(self) -> None:
        """The task was cancelled: `abort` said why, or the service ends."""
        if self.attempt is not None and self.attempt.target is not None:
            self.parts.metrics.transfer.failures.labels("aborted").inc()
        self._give_up(self._reason)
        self.parts.changed()

    async def run(self) -> None:
        """Try candidates until the caches are complete or the request is over."""
        try:
            await self._try_all()
        except asyncio.CancelledError:
            self.leave()
        except K3Error as error:
            self._give_up(prefill_pb2.ABORT_REASON_FAILED)
            self.caller.fail(error)
        finally:
            self.parts.changed()

    async def _try_all(self) -> None:
        candidates = self.request.spec.candidates
        for number, candidate in enumerate(candidates):
            if await self._try(candidate):
                return
            if self._deaths >= MAX_DEATHS:
                raise GroupFailed(
                    f"two prefill instances were lost while computing this request: {self._failures[-1]}",
                    code="poison_request",
                )
            if number + 1 < len(candidates):
                await self._back_off(number)
        raise self._exhausted()

    async def _back_off(self, number: int) -> None:
        jitter = self.parts.rng.uniform(0.8, 1.2)
        await asyncio.sleep(BACKOFF_S * 2**number * jitter)

    def _exhausted(self) -> K3Error:
        """What to say when no candidate is left."""
        if not self._failures:
            return Unavailable(
                "the request names no prefill candidate", code="no_prefill_available"
            )
        last = self._failures[-1]
        if all(isinstance(error, QueueFull) for error in self._failures):
            return last
        return Unavailable(
            f"all {len(self._failures)} prefill candidates failed, the last one: {last}",
            code=last.code,
        )

    async def _try(self, candidate: Candidate) -> bool:
        """One candidate. False: it failed and the next one may be tried. Raises what ends the request."""
        reconnects = 0
        while True:
            try:
                await self._attempt(candidate)
                return True
            except ReconnectRequired as error:
                reconnects += 1
                if reconnects > MAX_RECONNECTS:
                    return self._failed(candidate, error)
            except QueueFull as error:
                if error.code != "reserve_wait":
                    return self._failed(candidate, error)
                await self._admitted.wait()  # its pages are in prefill's cache: the same one again
            except K3Error as error:
                return self._failed(candidate, error)

    def _failed(self, candidate: Candidate, error: K3Error) -> bool:
        """Report a failed candidate. Raises `error` where the request cannot go on."""
        if isinstance(error, RequestRejected) or self.attempt is not None:
            raise error  # nobody would take it, or its first token is out
        self._failures.append(error)
        reason = reason_of(error)
        self.parts.metrics.candidates_failed.labels(reason).inc()
        log.warning(
            "prefill candidate failed",
            extra={
                "request_id": self.request.spec.request_id,
                "prefill": candidate.instance_id,
                "reason": reason,
                "error": str(error),
            },
        )
        self.caller.push(CandidateFailed(candidate.instance_id, reason, str(error)))
        return False

    async def _attempt(self, candidate: Candidate) -> None:
        """One stream to one candidate. Raises K3Error with all memory accounted for."""
        parts, request = self.parts, self.request
        self.attempt = None
        if not is_allowed(candidate.address, parts.config.allowed):
            raise Unavailable(
                f"prefill address {candidate.address!r} is not allowed here: serve.prefills is "
                f"{list(parts.config.allowed)}",
                code="not_allowed",
            )
        if self.generation and request.reservation is None:
            await self._admitted.wait()  # an earlier reservation is in quarantine
        await parts.is_open.wait()
        pair = await parts.pairs.get(candidate.address)
        if not parts.is_open.is_set():
            raise ReconnectRequired(
                "the transfer agents are being rebuilt; the peer knows old ones"
            )
        attempt = Attempt(request, pair, self._start(), parts.config.times, parts.hooks)
        self.attempt = attempt
        self.caller.opened_s = asyncio.get_running_loop().time()
        try:
            await attempt.run(parts.source.open(pair, attempt.deliver))
        except K3Error as error:
            if isinstance(error, ReconnectRequired | PrefillLost):
                parts.pairs.forget(pair)
            if attempt.target is not None:
                parts.metrics.transfer.failures.labels(failure_of(error)).inc()
                if error.code == "lease_expired":
                    parts.metrics.transfer.leases_expired.inc()
            if attempt.committed:
                raise TransferError(f"lost after the first token: {error}") from error
            if isinstance(error, PrefillLost | GroupFailed) and attempt.accepted:
                self._deaths += 1  # the process is gone, or its ranks are: whoever was to blame
            self._retire(attempt, error)
            if isinstance(error, RequestRejected) and attempt.accepted:
                raise TransferError(f"prefill refused what we sent: {error}") from error
            raise
        if attempt.stopped:
            self._give_up(prefill_pb2.ABORT_REASON_STOPPED)
        else:
            now = self.caller.filled_s = asyncio.get_running_loop().time()
            parts.metrics.transfer.seconds.observe(now - (self.caller.first_token_s or now))
            request.draft_valid = attempt.draft_valid
            if parts.identity.draft_fingerprint:
                request.bootstrap = "transferred" if attempt.draft_valid else "cold"
                parts.metrics.spec.bootstrap.labels(request.bootstrap).inc()
            parts.scheduler.filled(request)
            parts.quarantine.finish(attempt, None)
            parts.changed()

    def _retire(self, attempt: Attempt, error: K3Error) -> None:
        """A failed attempt, another one may follow: keep the reservation if it is quiet, else give it up."""
        quarantine = self.parts.quarantine
        reason = prefill_pb2.ABORT_REASON_FAILED
        self.attempt = None
        if attempt.target is None or attempt.quiesced or attempt.refused_by(error):
            quarantine.finish(attempt, reason)
            return
        self._admitted.clear()
        quarantine.take(self.parts.scheduler.requeue(self.request), attempt, reason)
        self.parts.changed()

    def _give_up(self, reason: prefill_pb2.AbortReason) -> None:
        """The request is over: release what is quiet, quarantine what is not. Idempotent."""
        request, attempt = self.request, self.attempt
        scheduler, quarantine = self.parts.scheduler, self.parts.quarantine
        self.attempt = None
        if request.state not in (State.QUEUED, State.ADMITTED, State.FILLING):
            return
        hold = scheduler.drop(request)
        if attempt is None:
            if hold is not None:  # a reservation once named, whose destination was proven quiet
                scheduler.settle(hold)
        elif hold is None or attempt.target is None or attempt.quiesced:
            if hold is not None:
                scheduler.settle(hold)
            quarantine.finish(attempt, reason)
        else:
            quarantine.take(hold, attempt, reason)

    def _start(self) -> prefill_pb2.Start:
        identity = self.parts.identity
        return wire.prefill_start(
            self.request.spec,
            instance_id=identity.instance_id,
            layout_fingerprint=identity.layout_fingerprint,
            draft_fingerprint=identity.draft_fingerprint,
        )


def reason_of(error: K3Error) -> str:
    """Stable short reason of a failed candidate, for the router and the metric's label."""
    match error:
        case QueueFull():
            return "resource_exhausted"
        case LayoutMismatch():
            return "layout_mismatch"
        case ReconnectRequired():
            return "reconnect_required"
        case DeadlineExceeded():
            return "deadline"
        case TransferError():
            return "transfer_stalled" if error.code == "transfer_stalled" else "transfer_failed"
        case PrefillLost() | GroupFailed():
            return "instance_failed"
        case _:
            return "not_allowed" if error.code == "not_allowed" else "unavailable"


def failure_of(error: K3Error) -> str:
    """Label of a transfer that did not complete."""
    match error:
        case PrefillLost():
            return "peer_lost"
        case ReconnectRequired():
            return "fenced"
        case DeadlineExceeded():
            return "lease"
        case TransferError() if error.code == "transfer_stalled":
            return "stalled"
        case _:
            return "handle"
