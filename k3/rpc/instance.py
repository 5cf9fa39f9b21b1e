"""What an engine instance says of itself: `Lifecycle` (probes), `LoadBoard` (snapshots), InstanceService.

`Lifecycle` joins what the engine knows (readiness, stall) with what the process knows (starting, stopping); probes,
health, metrics and load snapshots all read it, so they cannot disagree. `LoadBoard` is the one reader of
`engine.load_changed`: it takes a snapshot per change, at most 20 per second and at least every 2 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc.aio
from prometheus_client import CollectorRegistry

from k3.config.commandline import version
from k3.config.load import config_hash
from k3.config.tree import EngineConfig
from k3.errors import Unavailable
from k3.rpc.cache_feed import CacheFeed, CacheTail
from k3.rpc.ops import Answer
from k3.telemetry.metrics import EngineMetrics
from k3.v1 import instance_pb2, instance_pb2_grpc

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 2.0


class Engine(Protocol):
    """What a service's front implements to be served by `k3.rpc.engine.serve`."""

    load_changed: asyncio.Event
    """Set by the engine whenever `load` or `readiness` would answer differently; cleared by the board."""

    async def start(self, report: Callable[[str, int, int], None]) -> None:
        """Spawn the ranks and wait until they are warm. `report(stage, done, total)` tells progress."""
        ...

    async def run(self) -> None:
        """The driver loop. Returns after `stop`; raises GroupFailed when the ranks are lost for good."""
        ...

    async def stop(self) -> None:
        """End ranks and driver; idempotent, also right after a failed `start`."""
        ...

    def describe(self) -> instance_pb2.DescribeResponse:
        """Identity and capacities; asked only after `start`."""
        ...

    def load(self) -> instance_pb2.Load:
        """A snapshot; asked only after `start`. `ready` and `draining` are filled in by the caller."""
        ...

    def readiness(self) -> list[tuple[str, str]]:
        """Reasons (code, detail) against taking requests; empty = ready."""
        ...

    def is_stalled(self) -> bool:
        """Whether there is work but no step ended for stall_timeout_s, or the ranks are lost for good."""
        ...

    def begin_drain(self) -> None:
        """Refuse new requests with Unavailable(code="draining"); idempotent."""
        ...

    def end_drain(self) -> None:
        """Take requests again; idempotent."""
        ...

    @property
    def is_draining(self) -> bool:
        """Between `begin_drain` and `end_drain`."""
        ...

    @property
    def n_open(self) -> int:
        """Requests running or waiting, open streams included."""
        ...

    async def fail_open(self, code: str) -> None:
        """End every open request with Unavailable(code=code)."""
        ...

    def flush_cache(self) -> tuple[int, int]:
        """Drop reusable pages and checkpoints; returns how many of each."""
        ...

    def cache_feed(self) -> CacheFeed | None:
        """Events of the prefix cache of the current life; None without a cache or a life."""
        ...


class Lifecycle:
    """State of the process around an engine; the source of every probe."""

    def __init__(self, engine: Engine, config: EngineConfig, metrics: EngineMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._hash = config_hash(config)
        self._stage = "starting"
        self._is_started = False
        self.is_stopping = False

    def report(self, stage: str, done: int, total: int) -> None:
        """Progress of the start, shown by /startup and /ready."""
        self._stage = f"{stage} {done}/{total}" if total else f"{stage} {done}"

    def started(self) -> None:
        """The engine is loaded and warm."""
        self._is_started = True
        self._engine.load_changed.set()

    def stopping(self) -> None:
        """The process was asked to end: not ready any more, although requests may still be served."""
        self.is_stopping = True
        self._engine.load_changed.set()

    def reasons(self) -> list[tuple[str, str]]:
        """Why no new requests should be sent here; empty = ready."""
        if not self._is_started:
            return [("starting", self._stage)]
        reasons = [r for r in self._engine.readiness() if r[0] != "draining"]
        if self.is_stopping or self._engine.is_draining:
            reasons.insert(0, ("draining", f"{self._engine.n_open} requests open"))
        return reasons

    def describe(self) -> instance_pb2.DescribeResponse:
        """The engine's description. Raises Unavailable while starting."""
        if not self._is_started:
            raise Unavailable(f"starting: {self._stage}; try again", code="starting")
        return self._engine.describe()

    def watch(self) -> instance_pb2.WatchResponse:
        """A snapshot of identity and load; empty identity and zero load while starting."""
        load, identity = instance_pb2.Load(), ""
        if self._is_started:
            load, identity = self._engine.load(), self._engine.describe().instance_id
        load.ready = not self.reasons()
        load.draining = self.is_stopping or (self._is_started and self._engine.is_draining)
        return instance_pb2.WatchResponse(instance_id=identity, load=load)

    def is_alive(self) -> bool:
        """Liveness: false only when the engine makes no progress."""
        return not (self._is_started and self._engine.is_stalled())

    def health(self) -> Answer:
        """As OpsSource."""
        return (
            Answer(200, {"status": "ok"}) if self.is_alive() else Answer(503, {"status": "stalled"})
        )

    def ready(self) -> Answer:
        """As OpsSource."""
        reasons = [{"code": code, "detail": detail} for code, detail in self.reasons()]
        return Answer(503 if reasons else 200, {"ready": not reasons, "reasons": reasons})

    def startup(self) -> Answer:
        """As OpsSource."""
        return Answer(
            200 if self._is_started else 503, {"started": self._is_started, "stage": self._stage}
        )

    def version(self) -> Answer:
        """As OpsSource."""
        body: dict[str, object] = {"version": version(), "config_hash": self._hash}
        if self._is_started:
            d = self._engine.describe()
            body |= {
                "instance_id": d.instance_id,
                "layout_fingerprint": d.layout_fingerprint,
                "draft_fingerprint": d.draft_fingerprint,
            }
        return Answer(200, body)

    def refresh(self) -> CollectorRegistry:
        """As OpsSource: the load gauges follow the engine's own counters."""
        now = self.watch().load
        fingerprint = self._engine.describe().layout_fingerprint if self._is_started else ""
        self._metrics.common.identify(version(), self._hash, fingerprint)
        self._metrics.common.ready.set(now.ready)
        self._metrics.common.draining.set(now.draining)
        self._metrics.show(now)
        return self._metrics.registry


class LoadBoard:
    """The newest snapshot, for any number of watchers; `run` is its only writer."""

    def __init__(
        self,
        changed: asyncio.Event,
        take: Callable[[], instance_pb2.WatchResponse],
        on_snapshot: Callable[[instance_pb2.WatchResponse], None],
    ) -> None:
        self._changed, self._take, self._on_snapshot = changed, take, on_snapshot
        self._version = 0
        self._newest = instance_pb2.WatchResponse()
        self._next = asyncio.Event()
        self.is_closed = False

    async def run(self) -> None:
        """Publish a snapshot on every change until closed."""
        while not self.is_closed:
            self._changed.clear()
            snapshot = self._take()
            self._on_snapshot(snapshot)
            self._publish(snapshot)
            await asyncio.sleep(MIN_INTERVAL_S)
            try:
                async with asyncio.timeout(MAX_INTERVAL_S - MIN_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def close(self) -> None:
        """End `run` and every watcher."""
        self.is_closed = True
        self._changed.set()
        self._next.set()

    def _publish(self, snapshot: instance_pb2.WatchResponse) -> None:
        self._newest = snapshot
        self._version += 1
        self._next.set()
        if not self.is_closed:
            self._next = asyncio.Event()

    async def watch(self) -> AsyncIterator[instance_pb2.WatchResponse]:
        """The newest snapshot at once, then each newer one; a slow reader skips to the newest."""
        seen = 0
        while not self.is_closed:
            if self._version == seen:
                await self._next.wait()
                continue
            seen = self._version
            yield self._newest


class InstanceServicer(instance_pb2_grpc.InstanceServiceServicer):
    """InstanceService of an engine."""

    def __init__(
        self, engine: Engine, lifecycle: Lifecycle, board: LoadBoard, drain_timeout_s: float
    ) -> None:
        self._engine, self._lifecycle, self._board = engine, lifecycle, board
        self._drain_timeout_s = drain_timeout_s
        self._limit: asyncio.Task[None] | None = None

    async def Describe(self, request: Any, context: Any) -> instance_pb2.DescribeResponse:
        """See instance.proto."""
        return self._lifecycle.describe()

    async def Watch(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[instance_pb2.WatchResponse]:
        """See instance.proto."""
        tail = CacheTail(self._engine.cache_feed)
        async for snapshot in self._board.watch():
            for message in tail.messages(snapshot):
                yield message

    async def Drain(
        self, request: instance_pb2.DrainRequest, context: Any
    ) -> instance_pb2.DrainResponse:
        """See instance.proto. Raises Unavailable for a resume while the process is stopping."""
        self.close()
        if request.drain:
            self._engine.begin_drain()
            limit_s = request.timeout_s or self._drain_timeout_s
            self._limit = asyncio.create_task(self._end_drain(limit_s), name="drain limit")
        elif self._lifecycle.is_stopping:
            raise Unavailable("the process is stopping and cannot resume", code="draining")
        else:
            self._engine.end_drain()
        self._engine.load_changed.set()
        return instance_pb2.DrainResponse(
            draining=self._engine.is_draining, running=self._engine.n_open
        )

    async def FlushCache(self, request: Any, context: Any) -> instance_pb2.FlushCacheResponse:
        """See instance.proto."""
        self._lifecycle.describe()
        pages, checkpoints = self._engine.flush_cache()
        return instance_pb2.FlushCacheResponse(pages=pages, checkpoints=checkpoints)

    def close(self) -> None:
        """Forget a running drain limit."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    async def _end_drain(self, limit_s: float) -> None:
        await asyncio.sleep(limit_s)
        await self._engine.fail_open("draining")
