"""The engine behind `k3-decode`: lives of the rank group, one after another, and what the process frame asks of it.

A lost rank ends a life: open requests fail retryable, the ranks are started anew under a new instance id, at most
`MAX_RESTARTS` times in `RESTART_WINDOW_S`; with `serve.on_rank_loss=exit`, or when the restarts are used up, `run`
raises and the process ends. Requests are only taken while a life runs and nobody drains it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from decode_svc import wire
from decode_svc.caller import Caller
from decode_svc.deployment import Deployment, new_instance_id
from decode_svc.incarnation import Incarnation, Introduction, Ranks
from decode_svc.intake.remote import RemotePrefill
from k3.errors import GroupFailed, K3Error, Unavailable
from k3.rpc.client import ChannelPool
from k3.telemetry.metrics import DecodeMetrics
from k3.v1 import decode_pb2, instance_pb2, plan_pb2

log = logging.getLogger("k3.decode")

MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0
START_TIMEOUT_S = 1800.0  # weights of a large model may come from a slow disk
SETTLE_POLL_S = 0.02

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


class DecodeEngine:
    """Implements the process frame's `Engine`. `load_changed` is set on every change of the load."""

    def __init__(
        self,
        deployment: Deployment,
        make_group: MakeGroup,
        channels: ChannelPool,
        metrics: DecodeMetrics,
    ) -> None:
        self.metrics = metrics
        self.load_changed = asyncio.Event()
        self._deployment = deployment
        self._make_group = make_group
        self._channels = channels
        self._report: Report = _unreported
        self._instance_id = ""
        self._group: Group | None = None
        self._life: Incarnation | None = None
        self._restarts: deque[float] = deque()
        self._is_draining = False
        self._is_stopping = False
        self._lost = ""

    # ---------------------------------------------------------------- requests

    def open(self, request: decode_pb2.GenerateRequest) -> tuple[Incarnation, Caller]:
        """Take a request into the current life. Raises Unavailable, RequestRejected or QueueFull."""
        life = self._life
        if life is None:
            why = f"restarting after: {self._lost}" if self._lost else "starting"
            raise Unavailable(f"this decode instance is {why}; use another one", code="starting")
        if self._is_draining:
            raise Unavailable(
                f"{self._instance_id} is draining; use another instance", code="draining"
            )
        return life, life.open(wire.request_spec(request, self._deployment.spec.vocab_size))

    # ---------------------------------------------------------------- process frame

    async def start(self, report: Report) -> None:
        """Start the ranks. report(stage, done, total). Raises GroupFailed or ModelError."""
        self._report = report
        await self._begin_life()

    async def run(self) -> None:
        """Serve until `stop`. Raises GroupFailed when the ranks are lost for good."""
        while not self._is_stopping and self._life is not None:
            life = self._life
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
            life.fail(Unavailable(f"{self._instance_id} is shutting down", code="draining"))
            life.stop()
        if self._group is not None:
            await self._group.stop()
        await self._channels.close()

    async def fail_open(self, code: str) -> None:
        """End all open requests with Unavailable(code); waits for proofs of quiet up to `transfer.drain_s`."""
        life = self._life
        if life is None:
            return
        life.fail(Unavailable(f"{self._instance_id} ends its requests", code=code))
        try:
            async with asyncio.timeout(self._deployment.config.transfer.drain_s + 1.0):
                while life.n_busy:  # noqa: ASYNC110  (many owners, no one event)
                    await asyncio.sleep(SETTLE_POLL_S)
        except TimeoutError:
            log.warning("requests or quarantine remain after the drain", extra={"n": life.n_busy})

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
        """Callers that are not served yet."""
        return 0 if self._life is None else self._life.n_open

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
        limit_s = self._deployment.config.serve.stall_timeout_s
        return self._life is not None and self._life.stalled_s() >= limit_s

    def flush_cache(self) -> tuple[int, int]:
        """Decode keeps nothing for reuse."""
        return 0, 0

    # ---------------------------------------------------------------- lives

    async def _begin_life(self) -> None:
        self._instance_id = new_instance_id()
        self._group = self._make_group(
            self._deployment.setup(self._instance_id),
            _Progress(self._deployment.n_ranks, self._report),
        )
        movers = await self._group.start(START_TIMEOUT_S)
        versions = sorted({mover.nixl_version for mover in movers})
        if len(versions) != 1:
            raise GroupFailed(f"ranks run different transfer libraries: {versions}")
        self._life = Incarnation(
            self._deployment,
            self._instance_id,
            movers,
            self._group,
            self._source,
            self.metrics,
            self.load_changed.set,
        )
        self._lost = ""
        describe = self.describe()
        self.metrics.common.identify(
            describe.version, describe.config_hash, describe.layout_fingerprint
        )
        self.load_changed.set()
        log.info("instance ready", extra={"instance_id": self._instance_id})

    def _source(self, introduction: Introduction) -> RemotePrefill:
        return RemotePrefill(self._channels, introduction, self._deployment.check)

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
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
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
