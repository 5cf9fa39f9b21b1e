"""Decode computing its own prompts, by its schedulers alone: random histories on ranks that only remember.

A page remembers the tokens written to it, a state slot the tokens its state has seen. Whoever reads memory that holds
anything else, or gets it twice, or does not give it back, shows at once. Requests come, share prompts, leave in every
state; pools are small, so that pages and checkpoints are spent for newer ones all the time.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from decode_svc.caller import Caller
from decode_svc.deployment import Deployment
from decode_svc.local_prefill import LocalPrefill
from decode_svc.request import DecodeRequest, RequestSpec, State
from decode_svc.steps import Steps
from k3.config.tree import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
)
from k3.errors import QueueFull
from k3.telemetry.metrics import DecodeMetrics
from k3.types import RequestId, SamplingParams, StopParams
from k3.v1 import plan_pb2

pytestmark = pytest.mark.prefill

NANO = Path(__file__).parents[1] / "golden" / "k3"
P, LONGEST, END = 4, 48, 7
Words = tuple[int, ...]


def config(pp: int, prefix: str, mode: str = "fork_at_schedule") -> EngineConfig:
    return EngineConfig(
        role="both",
        model=ModelConfig(str(NANO), "nano", "float64", "cpu", LONGEST),
        parallel=ParallelConfig(pp=pp),
        cache=CacheConfig(
            page_tokens=P,
            pages=30,
            state_slots=8 if prefix == "on" else 4,
            prefix=prefix,
            checkpoint_interval=8,
            checkpoint_mode=mode,
        ),
        schedule=ScheduleConfig(max_rows=3, max_queue=6, token_budget=9, depth=2),
    )


class World:
    """The front of one life over ranks that execute a plan when it is acknowledged, or as soon as it is planned."""

    def __init__(self, settings: EngineConfig, seed: int, is_eager: bool) -> None:
        deployment = Deployment.of(settings, "digest")
        prompts = deployment.prompts()
        assert prompts is not None
        self.scheduler = deployment.scheduler(prompts)
        self.local = LocalPrefill(
            "decode-0",
            deployment.longest_local,
            self.scheduler,
            prompts,
            DecodeMetrics(),
            has_drafter=False,
        )
        self.steps = Steps(self.scheduler, self.local)
        self.limit = settings.parallel.pp + (
            settings.parallel.pp if settings.parallel.pp > 1 else 2
        )
        self.rng = random.Random(seed)
        self.is_eager = is_eager
        self.flying: deque[plan_pb2.StepPlan] = deque()
        self.callers: dict[int, Caller] = {}
        self.pages: dict[int, Words] = {}
        self.states: dict[int, Words] = {}
        self.stems = [self.words(30) for _ in range(3)]
        self.n_found = 0

    def words(self, n: int) -> Words:
        return tuple(self.rng.randrange(10, 99) for _ in range(n))

    def submit(self) -> None:
        stem = self.rng.choice(self.stems)[: self.rng.choice((0, 5, 16, 30))]
        prompt = (*stem, *self.words(self.rng.randint(1, 8)))
        stop = StopParams(self.rng.randint(1, LONGEST - len(prompt)), (END,))
        spec = RequestSpec(RequestId("r"), prompt, SamplingParams(temperature=0.0), stop)
        try:
            request = self.scheduler.submit(spec, 0.0)
        except QueueFull:
            return
        self.callers[request.key] = Caller(request)

    def admit(self) -> None:
        for request in self.scheduler.admit(0.0):
            self.local.start(self.callers[request.key], 0.0)

    def abort(self) -> None:
        alive = [r for r in self.scheduler.open_requests() if r.state is not State.FINISHING]
        if not alive:
            return
        request = self.rng.choice(alive)
        if self.local.is_computing(request):
            self.local.abort(request)
        elif request.state is State.RUNNING:
            self.scheduler.abort(request)
        else:
            self.scheduler.drop(request)

    def plan(self) -> None:
        plan = self.steps.plan(0.0)
        if plan is None:
            return
        sent = plan_pb2.StepPlan.FromString(plan.SerializeToString())
        self.flying.append(sent)
        assert len(self.flying) <= self.limit
        if self.is_eager:
            self.execute(sent)

    def execute(self, plan: plan_pb2.StepPlan) -> None:
        for row in plan.chunks:
            before = self.states[row.read_slot] if row.read_slot >= 0 else ()
            assert len(before) == row.start, f"{before} is no state of {row.start} tokens"
            held = [self.pages[page] for page in row.pages[: -(-row.start // P)]]
            assert tuple(word for page in held for word in page)[: row.start] == before
            after = self.states[row.write_slot] = (*before, *row.token_ids)
            for i in range(row.start // P, -(-len(after) // P)):
                self.pages[row.pages[i]] = after[i * P : (i + 1) * P]
            if row.HasField("copy_slot"):
                self.states[row.copy_slot] = after
        for row in plan.open_rows:
            request = self.callers[row.request].request
            state = self.states[row.state_slot]
            assert state == request.spec.prompt, "a row opens on the state of another prompt"
            n_pages = -(-row.base // P)
            held = [self.pages[page] for page in row.pages[:n_pages]]
            assert tuple(word for page in held for word in page) == state
            self.states[row.state_slot] = (0,)  # from here on decode writes it, and its pages
            for page in row.pages[row.base // P :]:
                self.pages[page] = (0,) * P

    def acknowledge(self) -> None:
        if not self.flying:
            return
        plan = self.flying.popleft()
        if not self.is_eager:
            self.execute(plan)
        result = plan_pb2.StepResult(step_id=plan.step_id)
        for row in plan.chunks:
            if row.is_final:
                entry = result.rows.add(request=row.request, epoch=row.epoch)
                entry.tokens.add(id=END if self.rng.random() < 0.1 else 1)
        for row in plan.verify_rows:
            entry = result.rows.add(row=row.row, epoch=row.epoch)
            if not row.opens:
                entry.tokens.add(id=END if self.rng.random() < 0.1 else 1)
        self.steps.absorb(result, 0.0)

    def run(self, n_events: int) -> None:
        events = (self.submit, self.admit, self.plan, self.plan, self.acknowledge, self.acknowledge)
        for _ in range(n_events):
            (self.abort if self.rng.random() < 0.06 else self.rng.choice(events))()
            self.check()
        while self.scheduler.open_requests() or self.flying:
            for event in (self.admit, self.plan, self.plan, self.acknowledge):
                event()
        self.check()
        counts = self.scheduler.memory.page_counts()
        slots = self.local.prompts.cache.slot_counts()
        assert (counts.held, slots.held, slots.pinned) == (0, 0, 0)
        assert self.scheduler.rows.counts().held == 0
        assert self.local.prompts.n_open == 0
        self.n_found += self.local.prompts.cache.totals()["hit_tokens"]

    def check(self) -> None:
        """Nobody holds a page that another one writes, nor a state slot of another one."""
        open_ = [r for r in self.scheduler.open_requests() if r.reservation is not None]
        slots = [self.slot(r) for r in open_]
        assert len(set(slots)) == len(slots)
        assert 0 not in slots, "the dummy was handed out"
        written: set[int] = set()
        for request in open_:
            own = set(self.held(request)[(request.prompt_len - 1) // P :])
            assert not own & written
            written |= own

    def holding(self, request: DecodeRequest):
        prompt = self.local.prompts.request(request.key)
        return None if prompt is None else prompt.holding

    def slot(self, request: DecodeRequest) -> int:
        holding = self.holding(request)
        return request.held.state_slot if holding is None else holding.tenant.live

    def held(self, request: DecodeRequest) -> tuple[int, ...]:
        holding = self.holding(request)
        return request.held.pages if holding is None else holding.pages


@pytest.mark.parametrize(
    ("pp", "prefix", "mode"),
    [
        (1, "off", "fork_at_schedule"),
        (1, "on", "copy"),
        (2, "on", "fork_at_schedule"),
        (3, "on", "fork_hold"),
    ],
)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), is_eager=st.booleans())
def test_memory_holds_what_its_reader_expects_and_comes_back(
    pp: int, prefix: str, mode: str, seed: int, is_eager: bool
) -> None:
    note(f"seed {seed}")
    World(config(pp, prefix, mode), seed, is_eager).run(120)


def test_prompts_find_what_earlier_ones_left() -> None:
    worlds = [World(config(2, "on"), seed, is_eager=True) for seed in range(3)]
    for world in worlds:
        world.run(200)
    assert sum(world.n_found for world in worlds) > 100


def test_a_prompt_that_waited_finds_what_came_to_be_cached_meanwhile() -> None:
    """Both are admitted at once and nothing is cached yet; a step has tokens for one of them only."""
    world = World(config(1, "on"), 3, is_eager=True)
    stem = world.words(16)
    for tail in ((11, 12), (13, 14)):
        spec = RequestSpec(RequestId("r"), (*stem, *tail), SamplingParams(), StopParams(3))
        request = world.scheduler.submit(spec, 0.0)
        world.callers[request.key] = Caller(request)
    world.admit()
    before = {r.key: world.held(r) for r in world.scheduler.open_requests()}
    while world.scheduler.open_requests() or world.flying:
        world.plan()
        world.acknowledge()
        if world.flying or world.local.prompts.n_running:
            world.check()
    second = world.callers[2]
    assert second.cached_tokens in (8, 16), "the second prompt computed everything again"
    assert not set(before[1]) & set(before[2])


def test_memory_of_an_aborted_prompt_waits_for_its_plan_where_transfers_write_too() -> None:
    """A transfer to its next owner keeps to no order of plans, so a chunk in flight could land after it."""
    plain = config(1, "off")
    schedule = replace(plain.schedule, local_prefill_max=40)
    world = World(replace(plain, role="decode", schedule=schedule), 7, is_eager=False)
    free = world.scheduler.memory.page_counts().free
    spec = RequestSpec(RequestId("r"), tuple(range(10, 22)), SamplingParams(), StopParams(4))
    for n_plans in (0, 1):
        request = world.scheduler.submit(spec, 0.0)
        world.callers[request.key] = Caller(request)
        world.admit()
        for _ in range(n_plans):
            world.plan()
        world.local.abort(request)
        counts = world.scheduler.memory.page_counts()
        assert (counts.held, counts.quarantined > 0) == (0, n_plans > 0)
        assert world.local.n_late == n_plans
        world.acknowledge()
        assert world.scheduler.memory.page_counts().free == free
        assert world.local.n_late == 0


def test_chunks_and_verify_groups_take_turns() -> None:
    """While a long prompt is computed, every running request takes part in every second plan."""
    world = World(config(1, "off"), 5, is_eager=True)
    short = RequestSpec(RequestId("s"), (1, 2), SamplingParams(), StopParams(20))
    world.callers[1] = Caller(world.scheduler.submit(short, 0.0))
    world.admit()
    while world.callers[1].request.state is not State.RUNNING:
        world.plan()
        world.acknowledge()
    long = replace(short, prompt=tuple(range(10, 46)), stop=StopParams(2))
    world.callers[2] = Caller(world.scheduler.submit(long, 0.0))
    world.admit()
    kinds = ""
    while world.callers[2].request.state is not State.RUNNING:
        n_before = len(world.flying)
        world.plan()
        if len(world.flying) > n_before:
            kinds += "c" if world.flying[-1].chunks else "g"
        world.acknowledge()
    assert kinds.count("c") >= 4
    assert "cc" not in kinds, kinds
