"""Rows over pipeline stages: one step at a time each, all stages busy, states from the last result."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from decode_svc.deployment import Deployment
from decode_svc.depth import plan_depth
from decode_svc.ledger import Ledger
from decode_svc.memory import PoolMemory
from decode_svc.plan import Emitted, Plan
from decode_svc.request import DecodeRequest, RequestSpec, State
from decode_svc.scheduler import DecodeScheduler, Limits
from k3.cache.pages import PagePool
from k3.cache.slots import SlotPool
from k3.config.tree import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, ScheduleConfig
from k3.types import RequestId, SamplingParams, StopParams, TokenEvent
from tests.sim.decode_world import NANO

pytestmark = pytest.mark.prefill

K = 3


def scheduler(stages: int, n_rows: int, draft_tokens: int = K) -> DecodeScheduler:
    limits = Limits(64, 400, depth=stages, draft_tokens=draft_tokens, is_staged=True)
    return DecodeScheduler(
        Ledger(4),
        limits,
        memory=PoolMemory(PagePool(400), SlotPool(n_rows, first=1)),
        rows=SlotPool(n_rows, first=1),
    )


def start(s: DecodeScheduler, n: int, max_tokens: int = 17) -> list[DecodeRequest]:
    requests = []
    for i in range(n):
        stop = StopParams(max_tokens)
        spec = RequestSpec(RequestId(f"r{i}"), (1,) * (i + 1), SamplingParams(), stop)
        requests.append(s.submit(spec, 0.0))
    for request in s.admit(0.0):
        s.fill(request)
        s.first_token(request, TokenEvent(100))
        s.filled(request)
    return requests


def answer(s: DecodeScheduler, plan: Plan, emitted: dict[int, int]) -> None:
    """emitted: tokens by row; drafts are named after the row and the position they are for."""
    results = []
    for step in plan.rows:
        n = 0 if step.opens else emitted[step.row.index]
        base = step.request.base + n
        drafts = tuple(1000 * step.row.index + base + 1 + i for i in range(s.limits.draft_tokens))
        tokens = tuple(TokenEvent(base + i) for i in range(n))
        results.append(Emitted(step.row.index, step.row.epoch, tokens, step.draft_len, (), drafts))
    s.advance(plan.step_id, results)


def test_every_stage_gets_rows_of_its_own() -> None:
    s = scheduler(stages=3, n_rows=7)
    start(s, 7)
    plans = [s.plan() for _ in range(3)]
    assert s.plan() is None
    named = [step.row.index for plan in plans if plan for step in plan.rows]
    assert sorted(named) == list(range(1, 8))
    assert [len(plan.rows) for plan in plans if plan] == [3, 3, 1]


def test_rows_take_turns_also_where_one_step_is_in_flight_at_a_time() -> None:
    s = scheduler(stages=2, n_rows=4, draft_tokens=0)
    start(s, 4)
    named = []
    for _ in range(4):
        plan = s.plan()
        assert plan is not None
        named.append([step.row.index for step in plan.rows])
        answer(s, plan, dict.fromkeys(range(1, 5), 1))
    assert named == [[1, 2], [3, 4], [1, 2], [3, 4]]


def test_a_lone_request_is_in_one_step_at_a_time() -> None:
    s = scheduler(stages=4, n_rows=2)
    start(s, 1)
    plan = s.plan()
    assert plan is not None
    assert s.plan() is None
    answer(s, plan, {})
    assert s.plan() is not None


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("seed", [5, 6])
def test_states_are_those_of_the_last_result_whatever_was_accepted(stages: int, seed: int) -> None:
    """Aborts in between; in the end everything is given back."""
    rng = random.Random(seed)
    s = scheduler(stages, n_rows=5)
    requests = start(s, 9)
    flying: deque[Plan] = deque()
    while s.open_requests():
        while (plan := s.plan()) is not None:
            flying.append(plan)
            for step in plan.rows:
                request, state = step.request, step.state
                assert state is not None
                assert state.base == step.base_bound == request.base
                assert state.anchor == request.outputs[-1].id
                if not step.opens:
                    row, first = step.row.index, state.base + 1
                    assert state.drafts == tuple(1000 * row + first + i for i in range(K))
                    assert step.draft_len == K
                else:
                    assert (state.read_column, state.drafts, step.draft_len) == (-1, (), 0)
            in_flight = [step.request.key for plan in flying for step in plan.rows]
            assert len(set(in_flight)) == len(in_flight)
            assert len(flying) <= stages
        plan = flying.popleft()
        answer(s, plan, {step.row.index: rng.randint(1, K + 1) for step in plan.rows})
        if rng.random() < 0.1 and (running := [r for r in requests if r.state is State.RUNNING]):
            s.abort(rng.choice(running))
        for request in s.admit(0.0):
            s.fill(request)
            s.first_token(request, TokenEvent(100))
            s.filled(request)
    assert (s.memory.page_counts().held, s.rows.counts().held) == (0, 0)


def test_without_drafts_a_row_is_opened_and_checked_in_one_step() -> None:
    s = scheduler(stages=2, n_rows=2, draft_tokens=0)
    start(s, 1)
    plan = s.plan()
    assert plan is not None
    (step,) = plan.rows
    assert (plan.opened, step.opens, plan.group_len) == ((step.request,), False, 1)


def test_one_function_says_how_far_steps_run_ahead() -> None:
    ahead = EngineConfig(schedule=ScheduleConfig(depth=2))
    staged = EngineConfig(parallel=ParallelConfig(pp=4), schedule=ScheduleConfig(depth=2))
    assert plan_depth(ahead) == (2, 2, 0)
    assert plan_depth(staged) == (4, 1, 0)
    assert plan_depth(replace(ahead, role="both")) == (2, 2, 1)
    assert plan_depth(replace(staged, role="both")) == (4, 1, 4)


def test_the_router_is_told_what_a_request_really_reserves() -> None:
    """It adds as many groups to the worst case of a request as may be in flight for one row."""
    config = EngineConfig(
        role="decode",
        model=ModelConfig(str(NANO), "nano", "float64", "cpu", 64),
        cache=CacheConfig(page_tokens=4, pages=12, state_slots=4),
        parallel=ParallelConfig(pp=2),
        schedule=ScheduleConfig(max_rows=3, depth=2),
    )
    deployment = Deployment.of(config, "digest")
    assert deployment.describe("d").depth == deployment.scheduler().limits.row_depth == 1
