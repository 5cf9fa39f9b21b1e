"""What the schedule of a prefill pipeline is worth, in simulated stage times, with the real scheduler."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from prefill_svc.core.chunk_size import ChunkCost
from prefill_svc.core.scheduler import Plan, Policy, PrefillScheduler
from prefill_svc.core.timeline import Arrival, Timeline, run

pytestmark = pytest.mark.prefill

P, BUDGET, LONG = 16, 256, 8192


def scheduler(pp: int, cost: ChunkCost | None = None) -> PrefillScheduler:
    policy = Policy(
        token_budget=BUDGET,
        max_inflight=pp,
        chunk_align=P,
        max_running=999,
        max_queue=999,
        short_len=BUDGET,
        max_long=pp,
        chunk_cost=cost,
    )
    return PrefillScheduler(policy, n_pages=9999, n_slots=999, page_tokens=P)


def by_tokens(plan: Plan) -> float:
    """Seconds of a plan on a stage: a launch and its tokens."""
    return 0.002 + plan.n_tokens * 1e-4


def check_contract(line: Timeline, pp: int) -> None:
    """Dense steps, at most P plans in flight, one chunk of a prompt in a plan, prompts covered without gap."""
    assert [flight.plan.step_id for flight in line.flights] == list(range(1, len(line.flights) + 1))
    assert line.max_inflight <= pp
    covered: dict[int, int] = {}
    for flight in line.flights:
        keys = [chunk.key for chunk in flight.plan.chunks]
        assert len(set(keys)) == len(keys)
        for chunk in flight.plan.chunks:
            assert chunk.start == covered.get(chunk.key, 0)
            covered[chunk.key] = chunk.end


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_a_lone_long_prompt_keeps_all_stages_busy(pp: int) -> None:
    """m chunks of one length: m / (m + P - 1) is the most that is possible, and nine tenths of it is the bar."""
    line = run(scheduler(pp), pp, by_tokens, [Arrival(1, LONG)])
    m = LONG // BUDGET
    check_contract(line, pp)
    assert len(line.flights) == m
    assert line.max_inflight == pp
    assert line.occupancy >= 0.9 * m / (m + pp - 1)
    assert line.occupancy == pytest.approx(m / (m + pp - 1))


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 33, 250])
def test_sixteen_short_prompts_beside_a_long_one_start_within_the_bound(
    pp: int, length: int
) -> None:
    """q short tokens ahead: ceil(q / reserve) + P steps, whatever the long one has still to do."""
    at = 4.5 * by_tokens(Plan(1, ()))
    shorts = [Arrival(key, length, at) for key in range(2, 18)]
    line = run(scheduler(pp), pp, by_tokens, [Arrival(1, LONG), *shorts])
    check_contract(line, pp)
    reserve = BUDGET // 4
    for ahead, short in enumerate(shorts):
        bound = -(-(ahead + 1) * length // reserve) + pp
        assert line.waited_steps(short.key) <= bound, f"short prompt {ahead}"
    if length < 250:
        assert max(line.done_at[short.key] for short in shorts) < line.done_at[1] / 2


def test_a_long_prompt_gets_its_share_beside_endless_short_ones() -> None:
    """At least (1 - reserve share) / max_long of every step as long as there are short ones to serve."""
    pp, step_s = 2, by_tokens(Plan(1, ())) + BUDGET * 1e-4
    shorts = [Arrival(key, 60, step_s * key / 6) for key in range(2, 240)]
    line = run(scheduler(pp), pp, by_tokens, [Arrival(1, LONG), *shorts])
    share = BUDGET - BUDGET // 4
    for flight in line.flights:
        lengths = {chunk.key: chunk.length for chunk in flight.plan.chunks}
        is_last = any(chunk.key == 1 and chunk.is_final for chunk in flight.plan.chunks)
        if 1 in lengths and not is_last:
            assert lengths[1] >= share // pp - P
    n_steps = sum(any(c.key == 1 for c in flight.plan.chunks) for flight in line.flights)
    assert n_steps <= LONG // (share // pp - P) + 1


costs = st.floats(0, 10, allow_nan=False)


@given(
    step=costs,
    cached=st.floats(0, 0.01),
    token=st.floats(0.01, 10),
    pair=st.one_of(st.just(0.0), st.floats(1e-7, 0.1)),
    before=st.integers(0, 200_000),
    budget=st.sampled_from([16, 48, 512, 16384]),
)
@settings(deadline=None)
def test_the_length_of_a_chunk_is_the_longest_that_takes_no_longer_than_the_first(
    step: float, cached: float, token: float, pair: float, before: int, budget: int
) -> None:
    cost = ChunkCost(step, cached, token, pair, budget)
    length = cost.length(before, P)
    target = cost.seconds(0, budget)
    assert P <= length <= budget
    assert length % P == 0
    assert length == P or cost.seconds(before, length) <= target * (1 + 1e-6)
    assert length == budget or cost.seconds(before, length + P) > target * (1 - 1e-6)


def test_chunks_that_shrink_keep_the_stages_of_a_quadratic_model_busier() -> None:
    """Steps of one length take longer and longer, and each stage waits for the slowest; equal times do not."""
    cost = ChunkCost(2.0, 0.0, 0.1, 4e-5, BUDGET)

    def by_pairs(plan: Plan) -> float:
        (chunk,) = plan.chunks
        return cost.seconds(chunk.start, chunk.length)

    even, shrinking = (run(scheduler(4, c), 4, by_pairs, [Arrival(1, LONG)]) for c in (None, cost))
    check_contract(shrinking, 4)
    lengths = [flight.plan.n_tokens for flight in shrinking.flights[:-1]]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < BUDGET / 4
    times = [by_pairs(flight.plan) for flight in shrinking.flights[:-1]]
    assert max(times) <= by_pairs(shrinking.flights[0].plan) * (1 + 1e-6)
    assert min(times) >= 0.65 * max(times)
    assert shrinking.occupancy > even.occupancy + 0.05
    assert shrinking.makespan < even.makespan


def test_costs_that_cannot_be_are_refused() -> None:
    for given_costs in ((-1, 0, 1, 0), (0, 0, 0, 0)):
        with pytest.raises(ValueError, match="chunk costs"):
            ChunkCost(*given_costs, budget=16)
