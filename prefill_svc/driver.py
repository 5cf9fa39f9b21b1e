"""The engine behind `k3-prefill`: lives of the rank group, one after another, and what the process frame asks of it.

A lost rank ends a life: open requests fail retryable, the ranks are started anew under a new instance id, at most
`MAX_RESTARTS` times in `RESTART_WINDOW_S`; with `serve.on_rank_loss=exit`, or when the restarts are used up, `run`
raises and the process ends. Requests are only taken while a life runs and nobody drains it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from k3.errors import GroupFailed, K3Error, Unavailable
from k3.telemetry.metrics import PrefillMetrics
from k3.v1 import instance_pb2, plan_pb2, prefill_pb2
from prefill_svc.deployment import Deployment, new_instance_id
from prefill_svc.export import Export, Stream
from prefill_svc.incarnation import Incarnation, Ranks

log = logging.getLogger("k3.prefill")

MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0
START_TIMEOUT_S = 1800.0  # weights of a large model may come from a slow disk

Report = Callable[[str, int, int], None]
OnProgress = Callable[[int, plan_pb2.LoadProgress], None]


class Group(Ranks, Protocol):
    """A rank group with its processes; `k3.rank.supervise.RankGroup` is one."""

    async def start(self, deadline_s: float) -> list[plan_pb2.MoverReady]:
        """All ranks up. Raises GroupFailed or ModelError."""
        ...

    async def stop(self, grace_s: float = 5.0) -> None:
        """End and reap all ranks. Idempotent."""
        ...


MakeGroup = Callable[[plan_pb2.Setup, OnProgress], Group]


class PrefillEngine:
    """Implements the process frame's `Engine`. `load_changed` is set on every change of the load."""

    def __init__(
        self,
        deployment: Deployment,
        make_group: MakeGroup,
        metrics: PrefillMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self.load_changed = asyncio.Event()
        self._deployment = deployment
        self._make_group = make_group
        self._clock = clock
        self._report: Report = _unreported
        self._instance_id = ""
        self._group: Group | None = None
        self._life: Incarnation | None = None
        self._restarts: deque[float] = deque()
        self._is_draining = False
        self._is_stopping = False
        self._lost: str = ""

    # ------------------------------------------------------------ requests

    def open(self, start: prefill_pb2.Start, stream: Stream) -> tuple[Incarnation, Export]:
        """Take a request into the current life. Raises Unavailable, or what `Incarnation.open` raises."""
        life = self.life()
        if self._is_draining:
            raise Unavailable(
                f"{self._instance_id} is draining; use another instance", code="draining"
            )
        return life, life.open(start, stream)

    def life(self) -> Incarnation:
        """The current life. Raises Unavailable while there is none."""
        if self._life is None:
            reason = f"restarting after: {self._lost}" if self._lost else "starting"
            raise Unavailable(
                f"this prefill instance is {reason}; use another one", code="starting"
            )
        return self._life

    # ------------------------------------------------------------ process frame

    async def start(self, report: Report) -> None:
        """Start the ranks. report(stage, done, total). Raises GroupFailed or ModelError."""
        self._report = report
        await self._begin_life()

    async def run(self) -> None:
        """Serve until `stop`. Raises GroupFailed when the ranks are lost for good."""
        while not self._is_stopping:
            life = self.life()
            try:
                await life.run()
            except GroupFailed as error:
                await self._end_life(life, error)
                if self._is_stopping:
                    return
                await self._restart(error)

    async def stop(self) -> None:
        """End every request and all ranks. Idempotent."""
        self._is_stopping = True
        life, self._life = self._life, None
        if life is not None:
            life.stop()
            life.fail(Unavailable(f"{self._instance_id} is shutting down", code="draining"))
        if self._group is not None:
            await self._group.stop()

    async def fail_open(self, code: str) -> None:
        """End all open requests with Unavailable(code), after what was posted has ended or `transfer.drain_s`."""
        life = self._life
        if life is None:
            return
        life.handoff.abort_all(Unavailable(f"{self._instance_id} ends its requests", code=code))
        patience_s = self._deployment.config.transfer.drain_s + 1.0
        try:
            async with asyncio.timeout(patience_s):
                await life.idle.wait()
        except TimeoutError:
            log.warning("requests remain after the drain", extra={"n": life.handoff.n_open})

    def begin_drain(self) -> None:
        """Take no new requests."""
        self._is_draining = True
        self.load_changed.set()

    def end_drain(self) -> None:
        """Take requests again."""
        self._is_draining = False
        self.load_changed.set()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._is_draining

    @property
    def n_open(self) -> int:
        """Requests waiting, computing or being sent."""
        return 0 if self._life is None else self._life.handoff.n_open

    def describe(self) -> instance_pb2.DescribeResponse:
        """Identity and capacities."""
        return self._deployment.describe(self._instance_id)

    def load(self) -> instance_pb2.Load:
        """Snapshot; zeros while there is no life."""
        load = instance_pb2.Load() if self._life is None else self._life.load()
        load.ready = not self.readiness()
        load.draining = self._is_draining
        return load

    def readiness(self) -> list[tuple[str, str]]:
        """Reasons not to send requests here, as (code, detail)."""
        reasons: list[tuple[str, str]] = []
        if self._life is None:
            reasons.append(
                ("restarting", self._lost) if self._lost else ("starting", "model loads")
            )
        if self._is_draining:
            reasons.append(("draining", "no new requests are taken"))
        return reasons

    def is_stalled(self) -> bool:
        """Whether a plan is unanswered for longer than `serve.stall_timeout_s`."""
        life = self._life
        return (
            life is not None and life.stalled_s() >= self._deployment.config.serve.stall_timeout_s
        )

    def flush_cache(self) -> tuple[int, int]:
        """Pages and checkpoints dropped; without a prefix cache there are none."""
        return 0, 0

    # ------------------------------------------------------------ lives

    async def _begin_life(self) -> None:
        self._instance_id = new_instance_id()
        self._group = self._make_group(
            self._deployment.setup(self._instance_id),
            _Progress(self._deployment.n_ranks, self._report),
        )
        ready = await self._group.start(START_TIMEOUT_S)
        versions = {mover.nixl_version for mover in ready}
        if len(versions) != 1:
            raise GroupFailed(f"ranks run different transfer libraries: {sorted(versions)}")
        self._life = Incarnation(
            self._deployment,
            self._instance_id,
            versions.pop(),
            self._group,
            self.metrics,
            self.load_changed.set,
            self._clock,
        )
        self._lost = ""
        self.load_changed.set()
        log.info("instance ready", extra={"instance_id": self._instance_id})

    async def _end_life(self, life: Incarnation, error: K3Error) -> None:
        self._life = None
        self._lost = str(error)
        log.error("rank group lost", extra={"instance_id": life.instance_id, "error": str(error)})
        life.fail(error)
        self.load_changed.set()
        if self._group is not None:
            await self._group.stop()

    async def _restart(self, error: GroupFailed) -> None:
        """Begin a new life, as often as allowed. Raises the last GroupFailed when it is not."""
        while True:
            now = self._clock()
            while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
                self._restarts.popleft()
            if self._deployment.config.serve.on_rank_loss == "exit":
                raise error
            if len(self._restarts) >= MAX_RESTARTS:
                raise GroupFailed(
                    f"{MAX_RESTARTS} restarts within {RESTART_WINDOW_S:g} s are used up; last loss: {error}"
                ) from error
            self._restarts.append(now)
            try:
                await self._begin_life()
            except GroupFailed as failure:
                if self._group is not None:
                    await self._group.stop()
                if self._is_stopping:
                    return
                error = failure
            else:
                return


class _Progress:
    """Adds the ranks' progress up: the stage of the last one to speak, summed over ranks in it."""

    def __init__(self, n_ranks: int, report: Report) -> None:
        self._n_ranks = n_ranks
        self._report = report
        self._ranks: dict[int, tuple[str, int, int]] = {}

    def __call__(self, rank: int, progress: plan_pb2.LoadProgress) -> None:
        self._ranks[rank] = (progress.stage, progress.done, progress.total)
        same = [entry for entry in self._ranks.values() if entry[0] == progress.stage]
        self._report(progress.stage, sum(e[1] for e in same), sum(e[2] for e in same))


def _unreported(stage: str, done: int, total: int) -> None:
    """Nobody asked for progress yet."""
