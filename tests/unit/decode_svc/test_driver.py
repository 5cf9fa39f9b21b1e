"""Lives of the rank group under the engine: start, loss, restart, exit, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from decode_svc.caller import Failed
from decode_svc.deployment import Deployment
from decode_svc.driver import DecodeEngine
from k3.config.tree import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from k3.errors import GroupFailed, RequestRejected, Unavailable
from k3.rank.lives import MAX_RESTARTS, OnProgress
from k3.rpc.client import ChannelPool
from k3.telemetry.metrics import DecodeMetrics
from k3.v1 import common_pb2, decode_pb2, plan_pb2, prefill_pb2
from tests.sim.decode_world import NANO, mover

CONFIG = EngineConfig(
    role="decode",
    model=ModelConfig(str(NANO), "nano", "float64", "cpu", 64),
    cache=CacheConfig(page_tokens=4, pages=12, state_slots=4),
    schedule=ScheduleConfig(max_rows=3),
)


class Group:
    """A rank group that does what the test says."""

    def __init__(self, setup: plan_pb2.Setup, on_progress: OnProgress) -> None:
        self.setup = setup
        self.on_progress = on_progress
        self.lost = asyncio.Event()
        self.start_error: GroupFailed | None = None
        self.n_stops = 0

    async def start(self, deadline_s: float) -> list[plan_pb2.MoverReady]:
        self.on_progress(0, plan_pb2.LoadProgress(stage="load", done=3, total=4))
        if self.start_error is not None:
            raise self.start_error
        return [mover("agent")]

    async def stop(self, grace_s: float = 5.0) -> None:
        self.n_stops += 1
        self.lost.set()

    async def send_plan(self, plan: plan_pb2.StepPlan) -> None: ...

    async def command(self, rank: int, command: plan_pb2.TransferCommand) -> None: ...

    async def next_result(self) -> plan_pb2.StepResult:
        return await self._until_lost()

    async def next_status(self) -> tuple[int, plan_pb2.TransferStatus]:
        return await self._until_lost()

    async def _until_lost(self) -> object:
        await self.lost.wait()
        raise GroupFailed("rank 0 is lost")


class Stage:
    """An engine and every group it made."""

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.groups: list[Group] = []
        self.prepare: Callable[[Group], None] = lambda _group: None
        self.engine = DecodeEngine(
            Deployment.of(config, "digest"), self._make, ChannelPool(), DecodeMetrics()
        )

    def _make(self, setup: plan_pb2.Setup, on_progress: OnProgress) -> Group:
        group = Group(setup, on_progress)
        self.prepare(group)
        self.groups.append(group)
        return group


def request(**changes: object) -> decode_pb2.GenerateRequest:
    return decode_pb2.GenerateRequest(
        request_id="r",
        token_ids=[1, 2],
        sampling=common_pb2.SamplingParams(temperature=0, top_p=1, repetition_penalty=1),
        stop=common_pb2.StopParams(max_tokens=3),
        **changes,  # type: ignore[arg-type]
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_nothing_is_taken_before_the_ranks_are_up() -> None:
    stage = Stage()
    with pytest.raises(Unavailable, match="starting") as caught:
        stage.engine.open(request())
    assert caught.value.code == "starting"
    assert stage.engine.readiness() == [("starting", "model loads")]
    assert stage.engine.load().ready is False
    reports: list[tuple[str, int, int]] = []
    await stage.engine.start(lambda *report: reports.append(report))
    assert reports == [("load", 3, 4)]
    assert stage.engine.readiness() == []
    assert stage.engine.describe().instance_id == stage.groups[0].setup.instance_id
    await stage.engine.stop()


async def test_a_lost_group_fails_requests_and_starts_anew_under_another_id() -> None:
    stage = Stage()
    await stage.engine.start(lambda *_: None)
    running = asyncio.create_task(stage.engine.run())
    first = stage.engine.describe().instance_id
    life, caller = stage.engine.open(request())
    stage.groups[0].lost.set()
    await until(lambda: len(stage.groups) == 2 and stage.engine.readiness() == [])
    event = await caller.next()
    while not isinstance(event, Failed):
        event = await caller.next()
    assert event.error.retryable
    life.close(caller, prefill_pb2.ABORT_REASON_CLIENT)
    assert stage.groups[0].n_stops == 1
    assert stage.engine.describe().instance_id != first
    assert stage.engine.load().pages_free == 12
    await stage.engine.stop()
    await running


@pytest.mark.prefill
async def test_what_prompts_leave_in_the_cache_is_told_and_flushed() -> None:
    """Nothing was computed yet; a flush is an event all the same."""
    cache = CacheConfig(page_tokens=4, pages=12, state_slots=6, prefix="on")
    stage = Stage(replace(CONFIG, role="both", cache=cache))
    assert stage.engine.cache_feed() is None
    await stage.engine.start(lambda *_: None)
    feed = stage.engine.cache_feed()
    assert feed is not None
    assert feed.instance_id == stage.engine.describe().instance_id
    assert stage.engine.flush_cache() == (0, 0)
    assert feed.seq == 1
    await stage.engine.stop()


async def test_decode_without_a_cache_tells_of_none() -> None:
    stage = Stage()
    await stage.engine.start(lambda *_: None)
    assert stage.engine.cache_feed() is None
    assert stage.engine.flush_cache() == (0, 0)
    await stage.engine.stop()


async def test_restarts_are_used_up_in_the_end() -> None:
    stage = Stage()
    await stage.engine.start(lambda *_: None)
    running = asyncio.create_task(stage.engine.run())
    for n in range(1, MAX_RESTARTS + 2):
        await until(lambda n=n: len(stage.groups) == n and stage.engine.readiness() == [])
        stage.groups[-1].lost.set()
    with pytest.raises(GroupFailed, match="used up"):
        await running
    await stage.engine.stop()


async def test_a_restart_that_fails_is_tried_again() -> None:
    stage = Stage()
    await stage.engine.start(lambda *_: None)
    running = asyncio.create_task(stage.engine.run())
    fails = iter([True, True, False])

    def prepare(group: Group) -> None:
        group.start_error = GroupFailed("no memory") if next(fails) else None

    stage.prepare = prepare
    stage.groups[0].lost.set()
    await until(lambda: len(stage.groups) == 4 and stage.engine.readiness() == [])
    await stage.engine.stop()
    await running


async def test_exit_on_loss_raises_at_once() -> None:
    stage = Stage(replace(CONFIG, serve=replace(CONFIG.serve, on_rank_loss="exit")))
    await stage.engine.start(lambda *_: None)
    running = asyncio.create_task(stage.engine.run())
    stage.groups[0].lost.set()
    with pytest.raises(GroupFailed, match="rank 0"):
        await running
    assert len(stage.groups) == 1
    await stage.engine.stop()


async def test_a_draining_instance_refuses_and_takes_again() -> None:
    stage = Stage()
    await stage.engine.start(lambda *_: None)
    stage.engine.begin_drain()
    with pytest.raises(Unavailable) as caught:
        stage.engine.open(request())
    assert caught.value.code == "draining"
    assert stage.engine.load().draining
    stage.engine.end_drain()
    with pytest.raises(RequestRejected):
        stage.engine.open(decode_pb2.GenerateRequest())
    await stage.engine.stop()


async def test_the_rest_is_failed_at_the_drain_limit() -> None:
    stage = Stage()
    await stage.engine.start(lambda *_: None)
    running = asyncio.create_task(stage.engine.run())
    life, caller = stage.engine.open(request())
    assert stage.engine.n_open == 1

    async def serve() -> Failed:
        try:
            while not isinstance(event := await caller.next(), Failed):
                pass
            return event
        finally:
            life.close(caller, prefill_pb2.ABORT_REASON_CLIENT)

    served = asyncio.create_task(serve())
    await stage.engine.fail_open("draining")
    assert (await served).error.code in ("draining", "no_prefill_available")
    assert stage.engine.n_open == 0
    await stage.engine.stop()
    await running
