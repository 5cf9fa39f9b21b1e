"""Stories of the decode scheduler: submit, take the plan, advance, check the next plan."""

import pytest

from decode_svc.ledger import Ledger
from decode_svc.memory import PoolMemory
from decode_svc.request import DecodeRequest, RequestSpec, State
from decode_svc.scheduler import DecodeScheduler, Emitted, Limits, Plan
from k3.cache.pages import PagePool
from k3.cache.slots import SlotPool
from k3.errors import QueueFull, RequestRejected
from k3.types import FinishReason, RequestId, SamplingParams, StopParams, TokenEvent

pytestmark = pytest.mark.dspark


def scheduler(
    *, pages: int = 20, rows: int = 2, queue: int = 2, depth: int = 2, drafts: int = 0
) -> DecodeScheduler:
    return DecodeScheduler(
        Ledger(4),
        Limits(max_queue=queue, max_model_len=100, depth=depth, draft_tokens=drafts),
        memory=PoolMemory(PagePool(pages), SlotPool(rows, first=1)),
        rows=SlotPool(rows, first=1),
    )


def submit(s: DecodeScheduler, n: int = 5, m: int = 4, eos: int = 0) -> DecodeRequest:
    return s.submit(
        RequestSpec(RequestId("r"), (1,) * n, SamplingParams(), StopParams(m, (eos,))), 1.0
    )


def run(s: DecodeScheduler, n: int = 5, m: int = 4) -> DecodeRequest:
    """A request with complete caches."""
    request = submit(s, n, m)
    assert s.admit(3.0) == [request]
    s.fill(request)
    s.first_token(request, TokenEvent(1))
    s.filled(request)
    return request


def take(s: DecodeScheduler) -> Plan:
    plan = s.plan()
    assert plan is not None
    return plan


def answer(s: DecodeScheduler, plan: Plan, *tokens: int) -> list[FinishReason | None]:
    events = tuple(TokenEvent(t) for t in tokens or (2,))
    emitted = [Emitted(step.row.index, step.row.epoch, events) for step in plan.rows]
    return [kept.finish for _request, kept in s.advance(plan.step_id, emitted)]


def test_a_request_opens_its_row_runs_and_closes_it() -> None:
    s = scheduler(depth=1)
    request = run(s, n=5, m=3)
    assert request.wait_s == 2.0
    first = take(s)
    assert (first.opened, first.closed, first.step_id) == ((request,), (), 1)
    assert first.rows[0].base_bound == 5
    assert answer(s, first) == [None]
    second = take(s)
    assert (second.opened, second.rows[0].base_bound) == ((), 6)
    assert answer(s, second) == [FinishReason.LENGTH]
    assert s.plan() is None
    assert s.memory.page_counts().free == 20
    other = run(s)
    third = take(s)
    assert third.closed == (second.rows[0].row,)
    assert third.opened == (other,)
    assert third.rows[0].row.epoch > second.rows[0].row.epoch or (
        third.rows[0].row.index != second.rows[0].row.index
    )


def test_at_most_depth_plans_are_in_flight_and_bounds_grow_with_them() -> None:
    s = scheduler(depth=2, drafts=3)
    run(s, n=5, m=30)
    first, second = take(s), take(s)
    assert s.plan() is None
    assert [p.rows[0].base_bound for p in (first, second)] == [5, 9]
    answer(s, first, 2, 2)
    assert take(s).rows[0].base_bound == 5 + 2 + 4  # confirmed, plus one whole group in flight


def test_no_step_is_planned_for_a_row_that_surely_ends() -> None:
    s = scheduler(depth=2)
    run(s, n=5, m=2)
    take(s)
    assert s.plan() is None


def test_a_step_for_rows_that_may_have_ended_waits_for_an_answer() -> None:
    s = scheduler(depth=2, drafts=3)
    run(s, n=5, m=6)
    first, second = take(s), take(s)  # one token was there before them, the first may add four
    answer(s, first, 2, 2)
    assert s.plan() is None, "the step in flight may add the last three"
    answer(s, second, 2)
    assert take(s).rows[0].base_bound == 5 + 2 + 1


def test_a_row_that_may_have_ended_takes_part_in_the_steps_of_others() -> None:
    s = scheduler(pages=30, depth=2, drafts=3)
    short, long = run(s, n=5, m=4), run(s, n=5, m=20)
    first, second = take(s), take(s)
    assert [[step.request for step in plan.rows] for plan in (first, second)] == 2 * [[short, long]]


def test_memory_is_kept_until_the_last_plan_that_names_the_row_is_acknowledged() -> None:
    s = scheduler(depth=2)
    request = run(s, m=9)
    first, second = take(s), take(s)
    assert answer(s, first, 0) == [FinishReason.STOP]
    assert request.state is State.FINISHING
    assert s.memory.page_counts().free < 20
    assert answer(s, second) == [], "a step after the end says nothing"
    assert request.state is State.GONE
    assert s.memory.page_counts().free == 20


def test_an_aborted_row_leaves_with_its_plans() -> None:
    s = scheduler(depth=2)
    request = run(s, m=9)
    plan = take(s)
    s.abort(request)
    s.abort(request)
    assert s.plan() is None
    assert answer(s, plan) == []
    assert request.state is State.GONE


def test_a_request_aborted_before_its_first_plan_is_never_opened() -> None:
    s = scheduler()
    request = run(s)
    s.abort(request)
    assert request.state is State.GONE
    other = run(s)
    plan = take(s)
    assert (plan.closed, plan.opened) == ((), (other,))


def test_a_small_request_does_not_pass_a_big_one() -> None:
    s = scheduler(pages=6, rows=3, queue=3)
    run(s, n=8, m=4)
    big, small = submit(s, n=16, m=4), submit(s, n=1, m=1)
    assert s.admit(0.0) == []
    s.drop(big)
    assert s.admit(0.0) == [small]


def test_a_full_queue_answers_at_once() -> None:
    s = scheduler(rows=1, queue=1)
    run(s)
    submit(s)
    with pytest.raises(QueueFull, match="max_queue=1"):
        submit(s)


def test_without_a_queue_a_request_is_taken_only_if_it_fits_now() -> None:
    s = scheduler(rows=1, queue=0)
    run(s)
    with pytest.raises(QueueFull):
        submit(s)


@pytest.mark.parametrize(
    ("n", "m", "text"),
    [
        (0, 1, "prompt is empty"),
        (1, 0, "max_tokens=0"),
        (90, 11, "max_model_len=100"),
        (80, 4, "need 21 pages, this instance has 20"),
    ],
)
def test_a_request_that_can_never_fit_is_rejected_with_the_numbers(
    n: int, m: int, text: str
) -> None:
    with pytest.raises(RequestRejected, match=text):
        submit(scheduler(), n, m)


def test_a_requeued_request_keeps_its_place_and_leaves_its_memory_behind() -> None:
    s = scheduler(pages=6, rows=3, queue=3)
    first = submit(s, n=8, m=2)
    second, third = submit(s, n=8, m=2), submit(s, n=8, m=2)
    assert s.admit(0.0) == [first, second]
    s.fill(first)
    hold = s.requeue(first)
    assert s.head(5) == [first, third]
    assert s.admit(0.0) == [], "its old pages are in quarantine"
    s.settle(hold)
    assert s.admit(9.0) == [first]
    assert first.wait_s == -1.0, "the wait is that of the first admission"


def test_an_answer_to_the_wrong_plan_is_a_bug_that_shows() -> None:
    s = scheduler()
    run(s, m=9)
    plan = take(s)
    row = plan.rows[0].row
    with pytest.raises(AssertionError, match="oldest plan is step 1"):
        s.advance(2, [Emitted(row.index, row.epoch, (TokenEvent(1),))])


def test_an_epoch_that_is_not_the_rows_is_a_bug_that_shows() -> None:
    s = scheduler()
    run(s, m=9)
    plan = take(s)
    row = plan.rows[0].row
    with pytest.raises(AssertionError):
        s.advance(1, [Emitted(row.index, row.epoch + 1, (TokenEvent(1),))])


def test_verified_tokens_after_the_end_are_dropped() -> None:
    s = scheduler(drafts=3, depth=1)
    request = run(s, m=9)
    assert answer(s, take(s), 5, 0, 6, 7) == [FinishReason.STOP]
    assert [t.id for t in request.outputs] == [1, 5, 0]
