"""Stories about the prefill scheduler: submit, take the plan, advance, look at the next plan."""

from __future__ import annotations

import pytest

from k3.errors import QueueFull, RequestRejected
from prefill_svc.core.prefix_cache import Prompt
from prefill_svc.core.request import Event, PrefillRequest, State
from prefill_svc.core.scheduler import Plan, Policy, PrefillScheduler

pytestmark = pytest.mark.prefill


def scheduler(
    *,
    budget: int = 32,
    inflight: int = 1,
    align: int = 4,
    running: int = 8,
    queue: int = 8,
    short: int = 32,
    n_pages: int = 64,
    n_slots: int = 16,
    max_long: int = 1,
) -> PrefillScheduler:
    policy = Policy(
        token_budget=budget,
        max_inflight=inflight,
        chunk_align=align,
        max_running=running,
        max_queue=queue,
        short_len=short,
        max_long=max_long,
    )
    return PrefillScheduler(policy, n_pages=n_pages, n_slots=n_slots, page_tokens=4)


def next_plan(s: PrefillScheduler) -> Plan:
    plan = s.plan(0.0)
    assert plan is not None
    return plan


def acknowledge(s: PrefillScheduler, plan: Plan) -> list[int]:
    finals = [(c.key, c.epoch) for c in plan.chunks if c.is_final]
    return [c.key for c in s.advance(plan.step_id, finals)]


def spans(plan: Plan) -> list[tuple[int, int, int, bool]]:
    return [(c.key, c.start, c.length, c.is_final) for c in plan.chunks]


def test_a_prompt_is_cut_at_the_token_budget_and_its_last_chunk_is_final() -> None:
    s = scheduler(budget=16)
    s.submit(1, 37, 0.0)
    seen = []
    while (plan := s.plan(0.0)) is not None:
        seen += spans(plan)
        acknowledge(s, plan)
    assert seen == [(1, 0, 16, False), (1, 16, 16, False), (1, 32, 5, True)]
    assert s.request(1) is not None
    assert s.request(1).state is State.SENDING


def test_chunks_carry_the_pages_up_to_their_end_and_start_from_the_zero_state() -> None:
    s = scheduler(budget=8)
    s.submit(1, 11, 0.0)
    first = next_plan(s)
    acknowledge(s, first)
    second = next_plan(s)
    assert len(first.chunks[0].pages) == 2
    assert len(second.chunks[0].pages) == 3
    assert second.chunks[0].pages[:2] == first.chunks[0].pages
    assert first.chunks[0].read_slot == -1
    assert second.chunks[0].read_slot == second.chunks[0].write_slot == first.chunks[0].write_slot


def test_short_prompts_share_one_step() -> None:
    s = scheduler(budget=32)
    for key, n in ((1, 7), (2, 1), (3, 13)):
        s.submit(key, n, 0.0)
    assert spans(next_plan(s)) == [(1, 0, 7, True), (2, 0, 1, True), (3, 0, 13, True)]


def test_no_more_plans_than_stages_are_in_flight() -> None:
    s = scheduler(budget=8, inflight=2)
    s.submit(1, 40, 0.0)
    first, second = next_plan(s), next_plan(s)
    assert s.plan(0.0) is None
    assert spans(second) == [(1, 8, 8, False)]
    acknowledge(s, first)
    assert spans(next_plan(s)) == [(1, 16, 8, False)]


def test_a_prompt_whose_final_chunk_is_in_flight_is_not_planned_again() -> None:
    s = scheduler(budget=32, inflight=3)
    s.submit(1, 5, 0.0)
    next_plan(s)
    assert s.plan(0.0) is None


def test_acknowledgements_out_of_order_raise() -> None:
    s = scheduler(budget=8, inflight=2)
    s.submit(1, 40, 0.0)
    next_plan(s)
    second = next_plan(s)
    with pytest.raises(AssertionError, match="oldest in flight is 1"):
        s.advance(second.step_id, [])


def test_a_token_for_a_chunk_that_is_not_final_raises() -> None:
    s = scheduler(budget=8)
    s.submit(1, 40, 0.0)
    plan = next_plan(s)
    with pytest.raises(AssertionError, match="drew tokens"):
        s.advance(plan.step_id, [(1, 1)])


def test_an_aborted_prompt_keeps_its_pages_until_it_is_released() -> None:
    s = scheduler(budget=8)
    s.submit(1, 40, 0.0)
    plan = next_plan(s)
    s.abort(1)
    s.abort(1)
    assert s.page_counts().held == 10
    assert acknowledge(s, plan) == []
    assert s.plan(0.0) is None
    s.release(1)
    s.release(1)
    assert s.page_counts().held == 0
    assert s.slot_counts().held == 0


def test_the_acknowledgement_of_an_aborted_prompts_final_chunk_is_ignored() -> None:
    s = scheduler(inflight=2)
    s.submit(1, 9, 0.0)
    plan = next_plan(s)
    s.abort(1)
    s.release(1)
    assert acknowledge(s, plan) == []
    assert s.n_open == 0


def test_a_computed_prompt_stays_pinned_until_it_is_released() -> None:
    s = scheduler()
    s.submit(1, 9, 0.0)
    acknowledge(s, next_plan(s))
    assert s.pinned_pages == 3
    s.release(1)
    assert s.page_counts().free == 64


def test_releasing_a_prompt_that_still_computes_raises() -> None:
    s = scheduler(budget=8)
    s.submit(1, 40, 0.0)
    next_plan(s)
    with pytest.raises(AssertionError, match="'release' is impossible in state 'running'"):
        s.release(1)


def test_a_prompt_that_can_never_fit_is_rejected() -> None:
    s = scheduler(n_pages=3)
    s.submit(1, 12, 0.0)
    with pytest.raises(RequestRejected, match="needs 4 pages of 4, this instance has 3"):
        s.submit(2, 13, 0.0)


def test_a_full_queue_is_refused_at_once() -> None:
    s = scheduler(running=1, queue=2)
    for key in (1, 2, 3):
        s.submit(key, 5, 0.0)
    with pytest.raises(QueueFull, match=r"schedule\.max_queue=2"):
        s.submit(4, 5, 0.0)
    next_plan(s)
    with pytest.raises(QueueFull):
        s.submit(4, 5, 0.0)


def test_prompts_wait_for_pages_in_order_of_arrival() -> None:
    s = scheduler(n_pages=4)
    s.submit(1, 12, 0.0)
    s.submit(2, 8, 0.0)
    s.submit(3, 1, 0.0)
    acknowledge(s, next_plan(s))
    assert s.plan(0.0) is None, "prompt 3 would fit, but prompt 2 came first"
    assert s.position(3) == 1
    s.release(1)
    assert [c.key for c in next_plan(s).chunks] == [2, 3]


def test_a_short_prompt_passes_a_long_one_within_its_reserve() -> None:
    s = scheduler(budget=64, short=16, n_pages=256)
    s.submit(1, 500, 0.0)
    acknowledge(s, next_plan(s))
    s.submit(2, 9, 0.0)
    assert spans(next_plan(s)) == [(1, 64, 52, False), (2, 0, 9, True)]


def test_a_reserve_that_is_no_multiple_of_the_alignment_is_rounded_up() -> None:
    """A quarter of 36 is 9: a short prompt of 12 tokens is complete in one step of chunks in fours."""
    s = scheduler(budget=36, short=16, n_pages=256)
    s.submit(1, 500, 0.0)
    s.submit(2, 12, 0.0)
    assert spans(next_plan(s)) == [(1, 0, 24, False), (2, 0, 12, True)]


def test_a_long_prompt_keeps_its_share_when_many_short_ones_come() -> None:
    s = scheduler(budget=64, short=16, n_pages=256, running=32, queue=64, n_slots=64)
    s.submit(1, 160, 0.0)
    for key in range(2, 20):
        s.submit(key, 16, 0.0)
    plan = next_plan(s)
    assert spans(plan) == [(1, 0, 48, False), (2, 0, 16, True)]


def test_a_second_long_prompt_waits_while_one_is_in_the_making() -> None:
    s = scheduler(budget=16, short=8, n_pages=256)
    s.submit(1, 48, 0.0)
    s.submit(2, 48, 0.0)
    order = []
    for _ in range(6):
        plan = next_plan(s)
        order += [c.key for c in plan.chunks]
        acknowledge(s, plan)
    assert order[:2] == [1, 1]
    assert order[-2:] == [2, 2]


def test_a_budget_below_one_page_still_makes_progress() -> None:
    s = scheduler(budget=3)
    s.submit(1, 7, 0.0)
    lengths = []
    while (plan := s.plan(0.0)) is not None:
        lengths += [c.length for c in plan.chunks]
        acknowledge(s, plan)
    assert lengths == [3, 3, 1]


def test_an_event_outside_the_table_raises() -> None:
    request = PrefillRequest(7, 1, Prompt(5), 0.0, 0)
    with pytest.raises(
        AssertionError, match="request 7: event 'token' is impossible in state 'waiting'"
    ):
        request.on(Event.TOKEN)
