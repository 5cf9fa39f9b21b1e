"""`GroupEngine`: lives of a rank group, one after another, and what the process frame asks of an engine.

A lost rank ends a life: open requests fail retryable, the ranks are started anew under a new instance id, at most
`MAX_RESTARTS` times in `RESTART_WINDOW_S`; with `serve.on_rank_loss=exit`, or when the restarts are used up, `run`
raises and the process ends. Requests are only taken while a life runs and nobody drains it. Both services derive their
engine from it; what a life does is theirs (`prefill_svc/incarnation.py`, `decode_svc/incarnation.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from k3.errors import GroupFailed, K3Error, Unavailable
from k3.rank.deployment import Deployment
from k3.rpc.cache_feed import CacheFeed
from k3.v1 import instance_pb2, plan_pb2

log = logging.getLogger("k3.engine")

MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0
START_TIMEOUT_S = 1800.0  # weights of a large model may come from a slow disk
DRAIN_SLACK_S = 1.0  # beyond `transfer.drain_s`, for the news of the last handle to come in

Report = Callable[[str, int, int], None]
OnProgress = Callable[[int, plan_pb2.LoadProgress], None]


class Ranks(Protocol):
    """What a life needs of the rank group."""

    async def send_plan(self, plan: plan_pb2.StepPlan) -> None:
        """To every rank. Raises GroupFailed."""
        ...

    async def next_result(self) -> plan_pb2.StepResult:
        """The acknowledgement of the oldest plan. Raises GroupFailed, also when it takes too long."""
        ...

    async def command(self, rank: int, command: plan_pb2.TransferCommand) -> None:
        """To one rank's mover. Raises GroupFailed."""
        ...

    async def next_status(self) -> tuple[int, plan_pb2.TransferStatus]:
        """Rank and what its mover says. Raises GroupFailed."""
        ...


class Group(Ranks, Protocol):
    """A rank group with its processes; `k3.rank.supervise.RankGroup` is one."""

    async def start(self, deadline_s: float) -> list[plan_pb2.MoverReady]:
        """All ranks up, their movers in flat order. Raises GroupFailed or ModelError."""
        ...

    async def stop(self, grace_s: float = 5.0) -> None:
        """End and reap all ranks. Idempotent."""
        ...


MakeGroup = Callable[[plan_pb2.Setup, OnProgress], Group]


class Life(Protocol):
    """Everything that is lost with a rank group."""

    async def run(self) -> None:
        """Work until `stop`. Raises GroupFailed when the ranks are lost."""
        ...

    def stop(self) -> None:
        """Let `run` return."""
        ...

    def fail(self, error: K3Error) -> None:
        """The ranks are gone: end every request with `error`."""
        ...

    def abort_all(self, error: K3Error) -> None:
        """End every request with `error`; the ranks live, so that memory takes its regular way."""
        ...

    async def settled(self) -> None:
        """Wait until no request is open and no memory waits for a proof of quiet."""
        ...

    @property
    def n_open(self) -> int:
        """Requests that are not finished with."""
        ...

    def load(self) -> instance_pb2.Load:
        """Snapshot of queues and pools, without readiness."""
        ...

    def stalled_s(self) -> float:
        """Seconds since the last acknowledgement while a plan is in flight, else 0."""
        ...


L = TypeVar("L", bound=Life)


class GroupEngine(ABC, Generic[L]):
    """Implements the process frame's `Engine`. `load_changed` is set on every change of the load."""

    def __init__(
        self,
        deployment: Deployment,
        make_group: MakeGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.load_changed = asyncio.Event()
        self._deployment = deployment
        self._make_group = make_group
        self._clock = clock
        self._report: Report = _unreported
        self._instance_id = ""
        self._description: instance_pb2.DescribeResponse | None = None
        self._group: Group | None = None
        self._life: L | None = None
        self._restarts: deque[float] = deque()
        self._is_draining = False
        self._is_stopping = False
        self._lost = ""
        self._slow: list[str] = []  # ranks that failed the self-test of transfers, with the reason

    @abstractmethod
    def _new_life(self, instance_id: str, movers: list[plan_pb2.MoverReady], ranks: Ranks) -> L:
        """A life over ranks that are up. movers: their agents in flat order, of one library version."""

    # ------------------------------------------------------------ requests

    def life(self) -> L:
        """The current life. Raises Unavailable while there is none."""
        if self._life is None:
            why = f"restarting after: {self._lost}" if self._lost else "starting"
            raise Unavailable(
                f"this {self._deployment.role_name} instance is {why}; use another one",
                code="starting",
            )
        return self._life

    def open_life(self) -> L:
        """The current life, for a new request. Raises Unavailable, also while draining."""
        life = self.life()
        if self._is_draining:
            raise Unavailable(
                f"{self._instance_id} is draining; use another instance", code="draining"
            )
        return life

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
        """End all open requests with Unavailable(code); waits for proofs of quiet up to `transfer.drain_s`."""
        life = self._life
        if life is None:
            return
        life.abort_all(Unavailable(f"{self._instance_id} ends its requests", code=code))
        try:
            async with asyncio.timeout(self._deployment.config.transfer.drain_s + DRAIN_SLACK_S):
                await life.settled()
        except TimeoutError:
            log.warning("requests or quarantine remain after the drain", extra={"n": life.n_open})

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
        """Requests that are not finished with."""
        return 0 if self._life is None else self._life.n_open

    def describe(self) -> instance_pb2.DescribeResponse:
        """Identity and capacities; made once per life, asked for with every change of the load."""
        if self._description is None or self._description.instance_id != self._instance_id:
            self._description = self._deployment.describe(self._instance_id)
        return self._description

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
        else:
            reasons += [("transfer_slow", reason) for reason in self._slow]
        if self._is_draining:
            reasons.append(("draining", "no new requests are taken"))
        return reasons

    def is_stalled(self) -> bool:
        """Whether a plan is unanswered for longer than `serve.stall_timeout_s`."""
        limit_s = self._deployment.config.serve.stall_timeout_s
        return self._life is not None and self._life.stalled_s() >= limit_s

    def flush_cache(self) -> tuple[int, int]:
        """Pages and checkpoints dropped; without a prefix cache there are none."""
        return 0, 0

    def cache_feed(self) -> CacheFeed | None:
        """None: most engines have no prefix cache."""
        return None

    # ------------------------------------------------------------ lives

    async def _begin_life(self) -> None:
        deployment = self._deployment
        self._instance_id = deployment.new_instance_id()
        self._group = self._make_group(deployment.setup(self._instance_id), _Progress(self._report))
        movers = await self._group.start(START_TIMEOUT_S)
        versions = sorted({mover.nixl_version for mover in movers})
        if len(versions) != 1:
            raise GroupFailed(f"ranks run different transfer libraries: {versions}")
        self._slow = [
            f"rank {rank}: {mover.self_test.problem}"
            for rank, mover in enumerate(movers)
            if mover.self_test.problem
        ]
        self._life = self._new_life(self._instance_id, movers, self._group)
        self._lost = ""
        self.load_changed.set()
        if self._slow:
            log.error("transfer self-test failed", extra={"reasons": self._slow})
        else:
            log.info("instance ready", extra={"instance_id": self._instance_id})

    async def _end_life(self, life: L, error: K3Error) -> None:
        self._life = None
        self._lost = str(error)
        log.error("rank group lost", extra={"instance_id": self._instance_id, "error": str(error)})
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

    def __init__(self, report: Report) -> None:
        self._report = report
        self._ranks: dict[int, tuple[str, int, int]] = {}

    def __call__(self, rank: int, progress: plan_pb2.LoadProgress) -> None:
        self._ranks[rank] = (progress.stage, progress.done, progress.total)
        same = [entry for entry in self._ranks.values() if entry[0] == progress.stage]
        self._report(progress.stage, sum(e[1] for e in same), sum(e[2] for e in same))


def _unreported(stage: str, done: int, total: int) -> None:
    """Nobody asked for progress yet."""
