"""A prefill service with its real ranks and real gRPC in the process of a test, and what it is configured like."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio

from k3.config.tree import (
    BackendsConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    TransferConfig,
)
from k3.rank.lives import OnProgress
from k3.rank.supervise import RankGroup
from k3.rpc.server import make_server
from k3.telemetry.metrics import PrefillMetrics
from k3.v1 import plan_pb2, prefill_pb2_grpc
from prefill_svc.deployment import Deployment
from prefill_svc.driver import PrefillEngine
from prefill_svc.service import PrefillServicer

GOLDEN = Path(__file__).parents[1] / "golden" / "k3"
P = 8
N_PAGES = 48


def config(pp: int = 1, tp: int = 1) -> EngineConfig:
    return EngineConfig(
        role="prefill",
        model=ModelConfig(
            path=str(GOLDEN), name="k3-nano", dtype="float64", device="cpu", max_model_len=300
        ),
        parallel=ParallelConfig(pp=pp, tp=tp, exchange="value"),
        cache=CacheConfig(page_tokens=P, pages=N_PAGES, state_slots=6, fill_nan=True),
        schedule=ScheduleConfig(max_rows=4, max_queue=3, token_budget=24, reserve_wait_s=2.0),
        transfer=TransferConfig(
            heartbeat_s=0.2, self_fence_s=5.0, drain_s=2.0, lease_s=8.0, handle_deadline_s=2.0
        ),
        backends=BackendsConfig(attention="reference", kda="reference", threads=1),
    )


class Service:
    """A running prefill service and a stub to it."""

    def __init__(self, engine: PrefillEngine, address: str) -> None:
        self.engine = engine
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = prefill_pb2_grpc.PrefillServiceStub(self.channel)

    async def is_at_baseline(self) -> bool:
        """Every page and slot is free again, by the engine's own counters."""
        async with asyncio.timeout(10.0):
            while True:
                load = self.engine.load()
                if (load.pages_free, load.state_slots_used, load.running) == (N_PAGES, 0, 0):
                    return True
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(pp: int, tp: int) -> AsyncIterator[Service]:
    deployment = Deployment.of(config(pp, tp), "digest")

    def make_group(setup: plan_pb2.Setup, on_progress: OnProgress) -> RankGroup:
        n_ranks = deployment.n_ranks
        return RankGroup("prefill", deployment.config, setup, n_ranks, on_progress=on_progress)

    engine = PrefillEngine(deployment, make_group, PrefillMetrics())
    await engine.start(lambda stage, done, total: None)
    driver = asyncio.create_task(engine.run())
    server = make_server(32)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(engine), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    running = Service(engine, f"127.0.0.1:{port}")
    try:
        yield running
    finally:
        await running.channel.close()
        await server.stop(1.0)
        await engine.stop()
        await driver
