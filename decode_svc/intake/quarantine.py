"""Memory that a dead transfer may still write into, and the proofs that return it.

A posted write cannot be called back, so pages and slots of a failed or aborted transfer stay out of circulation until
one of: prefill said `Quiesced` on the stream or to the unary `Quiesce`; the process that posted them is known dead,
plus `DEAD_SETTLE_S`; or our own agents were torn down (the hard fence). Waiting alone is never a proof.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from decode_svc.intake.attempt import Attempt
from decode_svc.intake.source import PrefillLost, PrefillSource, Proof
from decode_svc.scheduler import Hold
from k3.config.tree import TransferConfig
from k3.errors import K3Error
from k3.v1 import prefill_pb2

DEAD_SETTLE_S = 5.0  # what a dead process posted to a network card may still land for this long
ASK_AGAIN_S = 0.5

log = logging.getLogger("k3.decode.quarantine")


@dataclass(eq=False, slots=True)
class Entry:
    """One hold. since: loop time of its begin."""

    hold: Hold
    attempt: Attempt
    since: float
    task: asyncio.Task[None] | None = field(default=None)


class Quarantine:
    """Holds and the tasks that prove them quiet.

    settle: gives memory back to the scheduler. crashed: a task ended with something that is not news of a peer.
    """

    def __init__(
        self,
        source: PrefillSource,
        times: TransferConfig,
        settle: Callable[[Hold], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._source = source
        self._times = times
        self._settle = settle
        self._crashed = crashed
        self._entries: set[Entry] = set()
        self._closings: dict[asyncio.Task[None], Attempt] = {}

    def __len__(self) -> int:
        return len(self._entries) + len(self._closings)

    def take(self, hold: Hold, attempt: Attempt, reason: prefill_pb2.AbortReason) -> None:
        """Keep `hold` until the attempt's destination is proven quiet; ends the attempt's stream."""
        entry = Entry(hold, attempt, asyncio.get_running_loop().time())
        self._entries.add(entry)
        entry.task = asyncio.create_task(self._prove(entry, reason), name="proof of quiet")
        entry.task.add_done_callback(self._ended)

    def finish(self, attempt: Attempt, reason: prefill_pb2.AbortReason | None) -> None:
        """End the stream of an attempt that leaves no memory behind."""
        task = asyncio.create_task(self._close(attempt, reason), name="end of a prefill stream")
        self._closings[task] = attempt
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._closings.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crashed(error)

    def overdue(self) -> list[Hold]:
        """Memory whose proof has not come within a lease: no ordinary drain takes so long."""
        now = asyncio.get_running_loop().time()
        return [e.hold for e in self._entries if now - e.since >= self._times.lease_s]

    def settle_all(self) -> None:
        """Our agents were rebuilt, or the pools are new: nothing can land any more."""
        for entry in tuple(self._entries):
            self._release(entry)

    async def close(self) -> None:
        """Stop proving and cut every stream; what is held stays held."""
        tasks = [e.task for e in self._entries if e.task is not None] + list(self._closings)
        attempts = [e.attempt for e in self._entries] + list(self._closings.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for attempt in attempts:
            if attempt.call is not None:
                attempt.call.cancel()
        self._entries.clear()

    def _release(self, entry: Entry) -> None:
        if entry not in self._entries:
            return
        self._entries.discard(entry)
        if entry.task is not None and entry.task is not asyncio.current_task():
            entry.task.cancel()
        self._settle(entry.hold)

    async def _close(self, attempt: Attempt, reason: prefill_pb2.AbortReason | None) -> None:
        await attempt.close(reason)

    async def _prove(self, entry: Entry, reason: prefill_pb2.AbortReason) -> None:
        if not await entry.attempt.close(reason):
            await self._ask_until_proven(entry)
        self._release(entry)

    async def _ask_until_proven(self, entry: Entry) -> None:
        pair, transfer_id = entry.attempt.pair, entry.attempt.transfer_id
        assert transfer_id is not None, "an attempt without a destination is quiet"
        while True:
            match await self._ask(entry):
                case Proof.QUIET:
                    return
                case Proof.DEAD:
                    await asyncio.sleep(DEAD_SETTLE_S)
                    log.info(
                        "transfer settled: its sender is gone",
                        extra={"transfer": transfer_id, "prefill": pair.instance_id},
                    )
                    return
                case Proof.DRAINING | None:
                    await asyncio.sleep(ASK_AGAIN_S)

    async def _ask(self, entry: Entry) -> Proof | None:
        """None: nothing is known, ask again."""
        pair, transfer_id = entry.attempt.pair, entry.attempt.transfer_id
        assert transfer_id is not None
        try:
            return await self._source.quiesce(pair, transfer_id)
        except PrefillLost as error:
            return Proof.DEAD if error.code == "refused" else None
        except K3Error as error:
            log.debug(
                "quiesce failed",
                extra={"transfer": transfer_id, "prefill": pair.instance_id},
                exc_info=error,
            )
            return None
