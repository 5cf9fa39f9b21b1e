"""Requests on their way from admission to complete caches: who is filling, who may write where, the hard fence.

Each request has one task, a `Filling`. A destination that may still be written goes to quarantine and its request gets
a fresh reservation (`generation` + 1), waiting at its old place in the queue when there is no room.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable

from decode_svc.caller import Caller
from decode_svc.emission import keep
from decode_svc.intake.attempt import Attempt, Fenced, Hooks, Target, arrivals
from decode_svc.intake.filling import Filling, Identity, IntakeConfig, Parts
from decode_svc.intake.quarantine import Quarantine
from decode_svc.intake.source import Pair, Pairs, PrefillSource
from decode_svc.request import DecodeRequest, State
from decode_svc.scheduler import DecodeScheduler, Hold
from k3.errors import GroupFailed
from k3.rpc.convert import token_from_proto
from k3.telemetry.metrics import DecodeMetrics
from k3.v1 import plan_pb2, prefill_pb2

FENCE_DEADLINE_S = 30.0

log = logging.getLogger("k3.decode.intake")

Command = Callable[[int, plan_pb2.TransferCommand], Awaitable[None]]
Senders = Callable[[Pair, int, int], tuple[int, ...]]  # pair, prompt_len, rank
DraftSenders = Callable[[Pair, int], tuple[int, ...]]  # pair, rank


class Intake:
    """See the module's docstring.

    command: gives one rank's mover a command. senders, draft_senders: who a rank has to hear from.
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
        draft_senders: DraftSenders,
        changed: Callable[[], None],
        metrics: DecodeMetrics,
        rng: random.Random,
    ) -> None:
        self.scheduler = scheduler
        connects = metrics.transfer.connects
        self.pairs = Pairs(source, lambda result: connects.labels(result).inc())
        self.quarantine = Quarantine(source, config.times, self._settle, self._crashed)
        self.crash: BaseException | None = None  # a bug of ours ended a task; the driver raises it
        self._n_ranks = identity.n_ranks
        self._lease_s = config.times.lease_s
        self._changed = changed
        self._command = command
        self._senders = senders
        self._draft_senders = draft_senders
        self._fillings: dict[int, Filling] = {}
        self._by_transfer: dict[int, Attempt] = {}
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._rebuilt: set[int] = set()
        self._rebuild_done = asyncio.Event()
        hooks = Hooks(
            self._destination, self._expect, self._forget, self._first_token, self._ends_at_once
        )
        self._parts = Parts(
            identity=identity,
            config=config,
            scheduler=scheduler,
            source=source,
            pairs=self.pairs,
            quarantine=self.quarantine,
            hooks=hooks,
            is_open=self._is_open,
            changed=changed,
            metrics=metrics,
            rng=rng,
        )

    # ---------------------------------------------------------------- from the driver

    def start(self, caller: Caller) -> None:
        """Begin to fill a request, or tell its filling that it was admitted. A queued one starts early."""
        key = caller.request.key
        filling = self._fillings.get(key)
        if filling is None:
            filling = self._fillings[key] = Filling(self._parts, caller)
            filling.task = asyncio.create_task(filling.run(), name=f"fill {key}")
            filling.task.add_done_callback(lambda task: self._ended(key, task))
        if caller.request.reservation is not None:
            filling.admitted()

    def _ended(self, key: int, task: asyncio.Task[None]) -> None:
        filling = self._fillings.pop(key)
        if task.cancelled():  # before it ran at all
            filling.leave()
        elif (error := task.exception()) is not None:
            self._crashed(error)

    def _crashed(self, error: BaseException) -> None:
        self.crash = self.crash or error
        self._changed()

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
            self._changed()

    def on_status(self, rank: int, status: plan_pb2.TransferStatus) -> None:
        """A mover reports. Unknown transfers are late and mean nothing."""
        if status.WhichOneof("status") == "ready":
            self._rebuilt.add(rank)
            if len(self._rebuilt) == self._n_ranks:
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
        """Whether memory that cannot be proven quiet has grown beyond `cap` of all pages, or of all state slots."""
        late, scheduler = self.quarantine.overdue(), self.scheduler
        n_pages = sum(len(hold.pages) for hold in late)
        return (
            n_pages > cap * scheduler.memory.n_pages or len(late) > cap * scheduler.memory.n_slots
        )

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
        for rank in range(self._n_ranks):
            await self._command(rank, plan_pb2.TransferCommand(rebuild=plan_pb2.RebuildAgent()))
        try:
            async with asyncio.timeout(FENCE_DEADLINE_S):
                await self._rebuild_done.wait()
        except TimeoutError as error:
            missing = sorted(set(range(self._n_ranks)) - self._rebuilt)
            raise GroupFailed(
                f"ranks {missing} did not rebuild their transfer agents within {FENCE_DEADLINE_S:g} s"
            ) from error
        self.pairs.forget_all()
        self.quarantine.settle_all()
        self._is_open.set()

    # ---------------------------------------------------------------- hooks of an attempt

    def _destination(self, request: DecodeRequest, pair: Pair) -> Target:
        """Name the reservation; from here on it counts as writable."""
        filling = self._fillings[request.key]
        if request.state is State.ADMITTED:
            self.scheduler.fill(request)
        filling.generation += 1
        held = request.held
        message = prefill_pb2.Destination(
            transfer_id=secrets.randbits(64),
            nonce=secrets.randbits(32),
            generation=filling.generation,
            pages=held.pages[: self.scheduler.ledger.pages(request.prompt_len)],
            state_slot=held.state_slot,
            lease_s=self._lease_s,
        )
        ranks = range(self._n_ranks)
        target = Target(
            message,
            tuple(self._senders(pair, request.prompt_len, rank) for rank in ranks),
            tuple(self._draft_senders(pair, rank) for rank in ranks),
        )
        if any(target.draft_senders):
            message.draft_slot = held.state_slot  # a state slot is also a ring
        assert filling.attempt is not None
        self._by_transfer[message.transfer_id] = filling.attempt
        return target

    async def _expect(self, target: Target) -> None:
        message = target.message
        for rank, senders in enumerate(target.senders):
            expect = plan_pb2.ExpectTransfer(
                transfer_id=message.transfer_id,
                nonce=message.nonce,
                senders=senders,
                draft_senders=target.draft_senders[rank],
            )
            await self._command(rank, plan_pb2.TransferCommand(expect=expect))

    async def _forget(self, transfer_id: int) -> None:
        if self._by_transfer.pop(transfer_id, None) is None:
            return
        abort = plan_pb2.AbortTransfer(transfer_id=transfer_id)
        for rank in range(self._n_ranks):
            await self._command(rank, plan_pb2.TransferCommand(abort=abort))

    def _ends_at_once(self, request: DecodeRequest, prefilled: prefill_pb2.Prefilled) -> bool:
        token = token_from_proto(prefilled.token)
        return keep(request.spec.stop, 0, (token,)).finish is not None

    def _first_token(
        self, request: DecodeRequest, pair: Pair, prefilled: prefill_pb2.Prefilled
    ) -> bool:
        caller = self._fillings[request.key].caller
        now = asyncio.get_running_loop().time()
        caller.first_token_s = now
        caller.prefill_instance_id = pair.instance_id
        caller.cached_tokens = prefilled.cached_tokens
        kept = self.scheduler.first_token(request, token_from_proto(prefilled.token))
        caller.tell(kept, now)
        return kept.finish is not None

    def _settle(self, hold: Hold) -> None:
        self.scheduler.settle(hold)
        self._changed()
