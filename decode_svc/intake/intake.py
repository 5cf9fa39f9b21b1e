"""Requests on their way from admission to complete caches: candidates in order, destinations, the hard fence.

Each request has one task, `_Filling`. Before its first token is out a failed candidate is followed by the next one; a
destination that may still be written goes to quarantine and the request gets a fresh reservation (`generation` + 1),
waiting at its old place in the queue when there is no room. After the first token a failure ends the request.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from decode_svc.emission import keep
from decode_svc.generation import CandidateFailed, Generation
from decode_svc.intake.attempt import Attempt, Fenced, Hooks, Reserved, Target, arrivals
from decode_svc.intake.quarantine import Quarantine
from decode_svc.intake.source import Pair, Pairs, PrefillLost, PrefillSource, is_allowed
from decode_svc.request import Candidate, DecodeRequest, State
from decode_svc.scheduler import DecodeScheduler, Hold
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
from k3.rpc.convert import logprobs_to_proto, sampling_to_proto, stop_to_proto, token_from_proto
from k3.telemetry.metrics import DecodeMetrics
from k3.v1 import plan_pb2, prefill_pb2

BACKOFF_S = 0.05
MAX_DEATHS = 2  # a request that took two instances down is not tried a third time
MAX_RECONNECTS = 2  # per candidate
FENCE_DEADLINE_S = 30.0

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


Command = Callable[[int, plan_pb2.TransferCommand], Awaitable[None]]
Senders = Callable[[Pair, int, int], tuple[int, ...]]  # pair, prompt_len, rank


class Intake:
    """See the module's docstring.

    command: gives one rank's mover a command. senders: who a rank has to hear from.
    changed: called whenever memory or rows may have become available or a request may run. No I/O of its own.
    """

    def __init__(
        self,
        identity: Identity,
        config: IntakeConfig,
        scheduler: DecodeScheduler,
        source: PrefillSource,
        *,
        command: Command,
        senders: Senders,
        changed: Callable[[], None],
        metrics: DecodeMetrics,
        rng: random.Random,
    ) -> None:
        self.identity = identity
        self.config = config
        self.scheduler = scheduler
        self.source = source
        self.pairs = Pairs(source)
        self.quarantine = Quarantine(source, config.times, self._settle)
        self.changed = changed
        self.metrics = metrics
        self.rng = rng
        self._command = command
        self._senders = senders
        self.crash: BaseException | None = None  # a bug of ours ended a task; the driver raises it
        self._fillings: dict[int, _Filling] = {}
        self._by_transfer: dict[int, Attempt] = {}
        self._is_open = asyncio.Event()  # cleared while the agents are rebuilt
        self._is_open.set()
        self._rebuilt: set[int] = set()
        self._rebuild_done = asyncio.Event()
        self.hooks = Hooks(
            self._destination, self._expect, self._forget, self._first_token, self._ends_at_once
        )

    # ---------------------------------------------------------------- from the driver

    def start(self, generation: Generation) -> None:
        """Begin to fill a request, or tell its filling that it was admitted. A queued one starts early."""
        key = generation.request.key
        filling = self._fillings.get(key)
        if filling is None:
            filling = self._fillings[key] = _Filling(self, generation)
            filling.task = asyncio.create_task(filling.run(), name=f"fill {key}")
            filling.task.add_done_callback(lambda task: self._ended(key, task))
        if generation.request.reservation is not None:
            filling.admitted()

    def _ended(self, key: int, task: asyncio.Task[None]) -> None:
        filling = self._fillings.pop(key)
        if task.cancelled():  # before it ran at all
            filling.leave()
        elif task.exception() is not None:
            self.crash = task.exception()
            self.changed()

    def is_filling(self, request: DecodeRequest) -> bool:
        """Whether the request has a task here."""
        return request.key in self._fillings

    def abort(self, request: DecodeRequest, reason: prefill_pb2.AbortReason) -> None:
        """End a request that does not run yet; its memory takes the way of proof."""
        filling = self._fillings.get(request.key)
        if filling is not None:
            filling.abort(reason)
        elif request.state in (State.QUEUED, State.ADMITTED):
            self.scheduler.drop(request)
            self.changed()

    def on_status(self, rank: int, status: plan_pb2.TransferStatus) -> None:
        """A mover reports. Unknown transfers are late and mean nothing."""
        if status.WhichOneof("status") == "ready":
            self._rebuilt.add(rank)
            if len(self._rebuilt) == self.identity.n_ranks:
                self._rebuild_done.set()
            return
        report = arrivals(rank, status)
        if report is None:
            return
        transfer_id, item = report
        attempt = self._by_transfer.get(transfer_id)
        if attempt is not None:
            attempt.deliver(item)

    @property
    def n_transfers(self) -> int:
        """Destinations that may be written by the regular way."""
        return len(self._by_transfer)

    @property
    def n_open(self) -> int:
        """Tasks that still look after something."""
        return len(self._fillings) + len(self.quarantine)

    async def close(self) -> None:
        """Cancel everything; memory is not given back (the pools go away with the ranks)."""
        tasks = [f.task for f in self._fillings.values() if f.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.quarantine.close()
        self.pairs.close()

    # ---------------------------------------------------------------- the hard fence

    def needs_fence(self, cap: float) -> bool:
        """Whether memory that cannot be proven quiet has grown beyond `cap` of all pages."""
        return self.quarantine.overdue_pages() > cap * self.scheduler.pages.n_pages

    async def fence(self) -> None:
        """Rebuild every rank's transfer agent: the last resort. All incoming transfers fail, all quarantine ends.

        Raises GroupFailed when a rank does not answer.
        """
        log.warning("hard fence: rebuilding all transfer agents")
        self._is_open.clear()
        self._rebuilt.clear()
        self._rebuild_done.clear()
        for filling in self._fillings.values():
            if filling.attempt is not None:
                filling.attempt.deliver(Fenced())
        for rank in range(self.identity.n_ranks):
            await self._command(rank, plan_pb2.TransferCommand(rebuild=plan_pb2.RebuildAgent()))
        try:
            async with asyncio.timeout(FENCE_DEADLINE_S):
                await self._rebuild_done.wait()
        except TimeoutError as error:
            missing = sorted(set(range(self.identity.n_ranks)) - self._rebuilt)
            raise GroupFailed(
                f"ranks {missing} did not rebuild their transfer agents within {FENCE_DEADLINE_S:g} s"
            ) from error
        self.pairs.forget_all()
        self.quarantine.settle_all()
        self._is_open.set()

    async def wait_open(self) -> None:
        """Wait while agents are rebuilt."""
        await self._is_open.wait()

    # ---------------------------------------------------------------- hooks of an attempt

    def _destination(self, request: DecodeRequest, pair: Pair) -> Target:
        """Name the reservation; from here on it counts as writable."""
        filling = self._fillings[request.key]
        if request.state is State.ADMITTED:
            self.scheduler.fill(request)
        filling.generation_number += 1
        held, times = request.held, self.config.times
        message = prefill_pb2.Destination(
            transfer_id=secrets.randbits(64),
            nonce=secrets.randbits(32),
            generation=filling.generation_number,
            pages=held.pages[: self.scheduler.ledger.pages(request.prompt_len)],
            state_slot=held.state_slot.index,
            lease_s=times.lease_s,
        )
        ranks = range(self.identity.n_ranks)
        target = Target(
            message, tuple(self._senders(pair, request.prompt_len, rank) for rank in ranks)
        )
        assert filling.attempt is not None
        self._by_transfer[message.transfer_id] = filling.attempt
        return target

    async def _expect(self, target: Target) -> None:
        message = target.message
        for rank, senders in enumerate(target.senders):
            expect = plan_pb2.ExpectTransfer(
                transfer_id=message.transfer_id, nonce=message.nonce, senders=senders
            )
            await self._command(rank, plan_pb2.TransferCommand(expect=expect))

    async def _forget(self, transfer_id: int) -> None:
        if self._by_transfer.pop(transfer_id, None) is None:
            return
        abort = plan_pb2.AbortTransfer(transfer_id=transfer_id)
        for rank in range(self.identity.n_ranks):
            await self._command(rank, plan_pb2.TransferCommand(abort=abort))

    def _ends_at_once(self, request: DecodeRequest, prefilled: prefill_pb2.Prefilled) -> bool:
        token = token_from_proto(prefilled.token)
        return keep(request.spec.stop, 0, (token,)).finish is not None

    def _first_token(
        self, request: DecodeRequest, pair: Pair, prefilled: prefill_pb2.Prefilled
    ) -> bool:
        generation = self._fillings[request.key].generation
        now = asyncio.get_running_loop().time()
        generation.first_token_s = now
        generation.prefill_instance_id = pair.instance_id
        generation.cached_tokens = prefilled.cached_tokens
        kept = self.scheduler.first_token(request, token_from_proto(prefilled.token))
        generation.tell(kept, now)
        return kept.finish is not None

    def _settle(self, hold: Hold) -> None:
        self.scheduler.settle(hold)
        self.changed()


class _Filling:
    """One request's way through its candidates."""

    def __init__(self, intake: Intake, generation: Generation) -> None:
        self.intake = intake
        self.generation = generation
        self.request = generation.request
        self.generation_number = 0
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
        self._give_up(self._reason)
        self.intake.changed()

    async def run(self) -> None:
        """Try candidates until the caches are complete or the request is over."""
        try:
            await self._try_all()
        except asyncio.CancelledError:
            self.leave()
        except K3Error as error:
            self._give_up(prefill_pb2.ABORT_REASON_FAILED)
            self.generation.fail(error)
        finally:
            self.intake.changed()

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
        jitter = self.intake.rng.uniform(0.8, 1.2)
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
        self.intake.metrics.candidates_failed.labels(reason).inc()
        log.warning(
            "prefill candidate failed",
            extra={
                "request_id": self.request.spec.request_id,
                "prefill": candidate.instance_id,
                "reason": reason,
                "error": str(error),
            },
        )
        self.generation.push(CandidateFailed(candidate.instance_id, reason, str(error)))
        return False

    async def _attempt(self, candidate: Candidate) -> None:
        """One stream to one candidate. Raises K3Error with all memory accounted for."""
        intake, request = self.intake, self.request
        self.attempt = None
        if not is_allowed(candidate.address, intake.config.allowed):
            raise Unavailable(
                f"prefill address {candidate.address!r} is not allowed here: serve.prefills is "
                f"{list(intake.config.allowed)}",
                code="not_allowed",
            )
        await intake.wait_open()
        pair = await intake.pairs.get(candidate.address)
        if self.generation_number and request.reservation is None:
            await self._admitted.wait()  # an earlier reservation is in quarantine
        attempt = Attempt(request, pair, self._start(), intake.config.times, intake.hooks)
        self.attempt = attempt
        self.generation.opened_s = asyncio.get_running_loop().time()
        try:
            await attempt.run(intake.source.open(pair, attempt.deliver))
        except K3Error as error:
            if isinstance(error, ReconnectRequired | PrefillLost):
                intake.pairs.forget(pair)
            if attempt.committed:
                raise TransferError(f"lost after the first token: {error}") from error
            if isinstance(error, PrefillLost) and attempt.accepted:
                self._deaths += 1
            self._retire(attempt, error)
            raise
        if attempt.stopped:
            self._give_up(prefill_pb2.ABORT_REASON_STOPPED)
        else:
            self.generation.filled_s = asyncio.get_running_loop().time()
            intake.scheduler.filled(request)
            intake.quarantine.finish(attempt, None)
            intake.changed()

    def _retire(self, attempt: Attempt, error: K3Error) -> None:
        """A failed attempt, another one may follow: keep the reservation if it is quiet, else give it up."""
        quarantine = self.intake.quarantine
        reason = prefill_pb2.ABORT_REASON_FAILED
        self.attempt = None
        if attempt.target is None or attempt.quiesced or attempt.refused_by(error):
            quarantine.finish(attempt, reason)
            return
        self._admitted.clear()
        quarantine.take(self.intake.scheduler.requeue(self.request), attempt, reason)
        self.intake.changed()

    def _give_up(self, reason: prefill_pb2.AbortReason) -> None:
        """The request is over: release what is quiet, quarantine what is not. Idempotent."""
        request, attempt = self.request, self.attempt
        scheduler, quarantine = self.intake.scheduler, self.intake.quarantine
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
        spec, identity = self.request.spec, self.intake.identity
        return prefill_pb2.Start(
            proto_version=1,
            instance_id=identity.instance_id,
            request_id=spec.request_id,
            attempt=spec.attempt,
            token_ids=spec.prompt,
            salt=spec.salt,
            sampling=sampling_to_proto(spec.sampling),
            stop=stop_to_proto(spec.stop),
            output_prefix_len=spec.output_prefix_len,
            logprobs=logprobs_to_proto(spec.logprobs),
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
