"""Lives of the rank group, with a scripted group: start, loss, restart, drain, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k3.config.tree import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
)
from k3.errors import GroupFailed, Unavailable
from k3.rank.lives import MAX_RESTARTS, OnProgress
from k3.telemetry.metrics import PrefillMetrics
from k3.v1 import common_pb2, plan_pb2, prefill_pb2
from prefill_svc.deployment import Deployment
from prefill_svc.driver import PrefillEngine
from prefill_svc.export import Export, Phase
from tests.sim.prefill_ranks import Clock, Stream, connect_request

GOLDEN = Path(__file__).parents[2] / "golden" / "k3"
CONFIG = EngineConfig(
    role="prefill",
    model=ModelConfig(
        path=str(GOLDEN), name="nano", dtype="float32", device="cpu", max_model_len=64
    ),
    cache=CacheConfig(page_tokens=8, pages=8, state_slots=4),
    schedule=ScheduleConfig(max_rows=2, max_queue=2, token_budget=16),
)


class Group:
    """Answers plans at once with token 7, connects every peer, until it is told to fail."""

    def __init__(self, setup: plan_pb2.Setup, on_progress: OnProgress) -> None:
        self.setup = setup
        self.is_stopped = False
        self.answers_plans = True
        self._unanswered: list[plan_pb2.StepResult] = []
        self._on_progress = on_progress
        self._results: asyncio.Queue[plan_pb2.StepResult] = asyncio.Queue()
        self._statuses: asyncio.Queue[tuple[int, plan_pb2.TransferStatus]] = asyncio.Queue()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, deadline_s: float) -> list[plan_pb2.MoverReady]:
        self._on_progress(0, plan_pb2.LoadProgress(stage="load", done=1, total=2))
        return [plan_pb2.MoverReady(nixl_version="1.5.1")]

    async def stop(self, grace_s: float = 5.0) -> None:
        self.is_stopped = True

    def fail(self, why: str) -> None:
        self._failure.set_exception(GroupFailed(why))

    async def send_plan(self, plan: plan_pb2.StepPlan) -> None:
        rows = [
            plan_pb2.RowResult(
                request=row.request, epoch=row.epoch, tokens=[common_pb2.Token(id=7)]
            )
            for row in plan.chunks
            if row.is_final
        ]
        self._unanswered.append(plan_pb2.StepResult(step_id=plan.step_id, rows=rows))
        if self.answers_plans:
            self.answer()

    def answer(self) -> None:
        """All plans that have not been answered."""
        while self._unanswered:
            self._results.put_nowait(self._unanswered.pop(0))

    async def next_result(self) -> plan_pb2.StepResult:
        return await self._unless_failed(self._results)

    async def command(self, rank: int, command: plan_pb2.TransferCommand) -> None:
        if command.HasField("connect_peer"):
            answer = plan_pb2.PeerConnected(peer_id=command.connect_peer.peer_id)
            self._statuses.put_nowait((rank, plan_pb2.TransferStatus(peer_connected=answer)))

    async def next_status(self) -> tuple[int, plan_pb2.TransferStatus]:
        return await self._unless_failed(self._statuses)

    async def _unless_failed(self, queue: asyncio.Queue):
        wanted = asyncio.ensure_future(queue.get())
        await asyncio.wait([wanted, self._failure], return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            wanted.cancel()
            self._failure.result()
        return wanted.result()


class World:
    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.groups: list[Group] = []
        self.clock = Clock()
        self.deployment = Deployment.of(config, "digest")
        self.metrics = PrefillMetrics()
        self.engine = PrefillEngine(self.deployment, self.make_group, self.metrics, self.clock)
        self.export: Export | None = None  # of the newest request

    def make_group(self, setup: plan_pb2.Setup, on_progress: OnProgress) -> Group:
        self.groups.append(Group(setup, on_progress))
        return self.groups[-1]

    async def start(self) -> asyncio.Task[None]:
        await self.engine.start(lambda stage, done, total: None)
        return asyncio.create_task(self.engine.run())

    async def connect(self) -> None:
        request = connect_request("d1", cp=self.deployment.n_ranks)
        request.layout = self.deployment.layout
        request.layout_fingerprint = self.deployment.layout_fingerprint
        request.geometry.CopyFrom(self.deployment.geometry)
        await self.engine.life().connect(request)

    def start_of(self, n_tokens: int = 3) -> prefill_pb2.Start:
        return prefill_pb2.Start(
            proto_version=1,
            instance_id="d1",
            token_ids=range(1, 1 + n_tokens),
            sampling=common_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0),
            layout_fingerprint=self.deployment.layout_fingerprint,
        )

    def open(self, n_tokens: int = 3) -> Stream:
        stream = Stream()
        _life, self.export = self.engine.open(self.start_of(n_tokens), stream)
        return stream

    def point(self, transfer_id: int) -> None:
        """Decode names a destination for the newest request."""
        destination = prefill_pb2.Destination(
            transfer_id=transfer_id, nonce=6, generation=1, pages=[0], state_slot=0, lease_s=60.0
        )
        assert self.export is not None
        message = prefill_pb2.PrefillRequest(destination=destination)
        self.engine.life().handoff.receive(self.export, message)

    def counted(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(name)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5.0):
            while True:
                if condition():
                    return
                await asyncio.sleep(0)


async def test_a_request_is_answered_by_the_ranks() -> None:
    world = World()
    driver = await world.start()
    await world.connect()
    stream = world.open()
    await world.until(lambda: "prefilled" in stream.kinds())
    assert stream.kinds() == ["accepted", "prefilled"]
    assert stream.responses[1].prefilled.token.id == 7
    load = world.engine.load()
    assert (load.ready, load.running, load.pages_pinned, load.pages_free) == (True, 1, 1, 7)
    await world.engine.stop()
    await driver
    assert isinstance(stream.error, Unavailable)
    assert world.groups[0].is_stopped


async def test_the_loss_of_the_group_fails_requests_and_begins_a_new_life() -> None:
    world = World()
    driver = await world.start()
    await world.connect()
    world.groups[0].answers_plans = False
    stream = world.open()
    before = world.engine.describe().instance_id
    world.groups[0].fail("rank 0 was killed")
    await world.until(lambda: len(world.groups) == 2 and not world.engine.readiness())
    assert isinstance(stream.error, GroupFailed)
    assert world.groups[0].is_stopped
    after = world.engine.describe().instance_id
    assert after != before
    assert world.groups[1].setup.instance_id == after
    assert world.engine.load().pages_free == 8
    await world.engine.stop()
    await driver


async def test_restarts_are_used_up_after_three_in_ten_minutes() -> None:
    world = World()
    driver = await world.start()
    for n in range(MAX_RESTARTS):
        world.groups[-1].fail(f"loss {n}")
        await world.until(lambda n=n: len(world.groups) == n + 2 and not world.engine.readiness())
    world.groups[-1].fail("one too many")
    with pytest.raises(GroupFailed, match=r"3 restarts within 600 s are used up.*one too many"):
        await driver
    await world.engine.stop()


async def test_old_restarts_do_not_count() -> None:
    world = World()
    driver = await world.start()
    for n in range(MAX_RESTARTS + 2):
        world.clock.now_s += 400.0
        world.groups[-1].fail(f"loss {n}")
        await world.until(lambda n=n: len(world.groups) == n + 2 and not world.engine.readiness())
    assert not driver.done()
    await world.engine.stop()
    await driver


async def test_on_rank_loss_exit_ends_the_driver() -> None:
    world = World(replace(CONFIG, serve=replace(CONFIG.serve, on_rank_loss="exit")))
    driver = await world.start()
    world.groups[0].fail("rank 0 was killed")
    with pytest.raises(GroupFailed, match="rank 0 was killed"):
        await driver
    assert len(world.groups) == 1
    await world.engine.stop()


async def test_a_draining_engine_takes_no_new_requests_and_finishes_the_old_ones() -> None:
    world = World()
    driver = await world.start()
    await world.connect()
    stream = world.open()
    world.engine.begin_drain()
    with pytest.raises(Unavailable) as caught:
        world.open()
    assert caught.value.code == "draining"
    assert world.engine.readiness()[0][0] == "draining"
    await world.until(lambda: "prefilled" in stream.kinds())
    assert world.engine.n_open == 1
    await world.engine.fail_open("draining")
    assert world.engine.n_open == 0
    assert isinstance(stream.error, Unavailable)
    assert stream.error.code == "draining"
    world.engine.end_drain()
    assert world.engine.readiness() == []
    await world.engine.stop()
    await driver


async def test_an_unanswered_plan_shows_as_a_stall() -> None:
    world = World()
    driver = await world.start()
    await world.connect()
    world.groups[0].answers_plans = False
    world.open()
    assert world.engine.life()
    await world.until(lambda: world.engine.life().scheduler.n_inflight == 1)
    assert not world.engine.is_stalled()
    world.clock.now_s += 30.0
    assert world.engine.is_stalled()
    await world.engine.stop()
    await driver


async def test_a_transfer_whose_heartbeats_are_not_echoed_counts_as_an_expired_lease() -> None:
    world = World()
    driver = await world.start()
    await world.connect()
    stream = world.open()
    world.point(transfer_id=5)
    assert world.engine.load().transfers == 1
    world.clock.now_s += world.deployment.config.transfer.self_fence_s
    assert world.export is not None
    await world.until(lambda: world.export.phase is Phase.DRAINING)
    world.clock.now_s += world.deployment.config.transfer.drain_s
    await world.until(lambda: stream.is_finished)
    assert world.counted("k3_transfer_leases_expired_total") == 1
    await world.engine.stop()
    await driver


async def test_a_destination_that_was_given_up_before_it_came_is_fenced_and_counted() -> None:
    world = World()
    driver = await world.start()
    await world.connect()
    stream = world.open()
    life = world.engine.life()
    request = prefill_pb2.QuiesceRequest(
        instance_id="d1", prefill_instance_id=life.instance_id, transfer_ids=[5]
    )
    assert life.handoff.quiesce(request) == [prefill_pb2.QUIESCE_STATE_QUIESCED]
    world.point(transfer_id=5)
    assert stream.error is not None
    assert stream.error.code == "fenced"
    assert world.counted("k3_transfer_fenced_writes_total") == 1
    await world.engine.stop()
    await driver


async def test_before_the_start_requests_are_turned_away() -> None:
    world = World()
    with pytest.raises(Unavailable) as caught:
        world.open()
    assert caught.value.code == "starting"


async def test_a_cache_that_makes_stages_wait_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = CacheConfig(
        page_tokens=8,
        pages=8,
        state_slots=4,
        prefix="on",
        checkpoint_interval=16,
        checkpoint_mode="fork_hold",
    )
    for pp in (1, 2):
        world = World(replace(CONFIG, cache=cache, parallel=ParallelConfig(pp=pp)))
        running = await world.start()
        assert ("use fork_at_schedule" in caplog.text) == (pp > 1)
        await world.engine.stop()
        await running


@pytest.mark.prefill
async def test_seconds_that_requests_are_held_are_counted() -> None:
    cache = replace(CONFIG.cache, prefix="on", checkpoint_interval=16, checkpoint_mode="fork_hold")
    world = World(replace(CONFIG, cache=cache, parallel=ParallelConfig(pp=2)))
    running = await world.start()
    await world.connect()
    group = world.groups[0]
    group.answers_plans = False
    stream = world.open(n_tokens=41)
    await world.until(lambda: world.counted("k3_prefill_held_requests") == 1)
    world.clock.now_s += 3.0
    group.answer()
    group.answers_plans = True
    await world.until(lambda: "prefilled" in stream.kinds())
    assert world.counted("k3_prefill_hold_seconds_total") == pytest.approx(3.0)
    assert world.counted("k3_prefill_held_requests") == 0
    await world.engine.stop()
    await running


async def test_what_is_cached_is_told_and_flushed() -> None:
    """Three tokens fill no page, so the cache stays empty; a flush is an event all the same."""
    cache = CacheConfig(page_tokens=8, pages=8, state_slots=4, prefix="on", checkpoint_interval=8)
    world = World(replace(CONFIG, cache=cache))
    assert world.engine.cache_feed() is None
    running = await world.start()
    feed = world.engine.cache_feed()
    assert feed is not None
    assert feed.instance_id == world.engine.describe().instance_id
    assert world.engine.flush_cache() == (0, 0)
    assert feed.seq == 1
    await world.engine.stop()
    await running
