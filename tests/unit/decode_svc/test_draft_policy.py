"""How many drafts a plan checks, and that plans, rows and requests agree about which drafts exist."""

from __future__ import annotations

import pytest

from decode_svc.draft_policy import DraftPolicy
from decode_svc.gate import GateRule, SpeculationGate
from decode_svc.ledger import Ledger
from decode_svc.memory import PoolMemory
from decode_svc.request import DecodeRequest, RequestSpec
from decode_svc.scheduler import DecodeScheduler, Emitted, Limits, Plan
from k3.cache.pages import PagePool
from k3.cache.slots import SlotPool
from k3.calibration import Calibration, StepRates
from k3.types import RequestId, SamplingParams, StopParams, TokenEvent

pytestmark = pytest.mark.dspark

K = 3


def world(policy: DraftPolicy, *, depth: int = 1) -> DecodeScheduler:
    return DecodeScheduler(
        Ledger(4),
        Limits(max_queue=9, max_model_len=400, depth=depth, draft_tokens=K),
        memory=PoolMemory(PagePool(400), SlotPool(4, first=1)),
        rows=SlotPool(4, first=1),
        policy=policy,
    )


def run(s: DecodeScheduler, m: int = 60) -> DecodeRequest:
    spec = RequestSpec(RequestId("r"), (1,) * 5, SamplingParams(), StopParams(m))
    request = s.submit(spec, 0.0)
    s.admit(0.0)
    s.fill(request)
    s.first_token(request, TokenEvent(1))
    s.filled(request)
    return request


def take(s: DecodeScheduler) -> Plan:
    plan = s.plan()
    assert plan is not None
    return plan


def answer(s: DecodeScheduler, plan: Plan, confidence: tuple[float, ...] = ()) -> None:
    """No draft is accepted."""
    s.advance(
        plan.step_id,
        [
            Emitted(r.row.index, r.row.epoch, (TokenEvent(2),), r.draft_len, confidence)
            for r in plan.rows
        ],
    )


def lengths(plan: Plan) -> list[int]:
    return [row.draft_len for row in plan.rows]


def calibration(*per_s: float, temperatures: tuple[float, ...] = (1.0,) * K) -> Calibration:
    """Rates of steps of 1, 2, .. tokens."""
    rates = StepRates(tuple(range(1, len(per_s) + 1)), tuple(per_s))
    return Calibration("d", temperatures, rates, rates)


class Switch(SpeculationGate):
    """A gate that is where the test wants it."""

    def __init__(self) -> None:
        super().__init__(GateRule(1, 0.0, 1))
        self.wanted = True

    def decide(self, n_rows: int) -> bool:
        return self.wanted


@pytest.mark.parametrize("depth", [1, 2])
def test_a_gate_switches_whole_steps_and_the_first_step_after_it_only_proposes(depth: int) -> None:
    gate = Switch()
    s = world(DraftPolicy(K, gate=gate), depth=depth)
    run(s)
    seen: list[tuple[int, bool, list[int]]] = []
    flying: list[Plan] = []
    for wanted in (True, True, False, False, True, True):
        gate.wanted = wanted
        flying.append(take(s))
        seen.append((flying[-1].group_len, flying[-1].no_drafts, lengths(flying[-1])))
        if len(flying) == depth:
            answer(s, flying.pop(0))
    assert seen == [
        (4, False, [3]),
        (4, False, [3]),
        (1, True, [0]),
        (1, True, [0]),
        (1, False, [0]),
        (4, False, [3]),
    ]


def test_a_row_that_opens_as_the_gate_does_has_drafts_before_the_others() -> None:
    gate = Switch()
    s = world(DraftPolicy(K, gate=gate))
    run(s)
    gate.wanted = False
    answer(s, take(s))
    gate.wanted = True
    run(s)
    plan = take(s)
    assert (lengths(plan), plan.group_len, plan.no_drafts) == ([0, 3], 4, False)
    answer(s, plan)
    assert lengths(take(s)) == [3, 3]


def test_ended_requests_tell_the_gate_what_their_drafts_were_worth() -> None:
    gate = SpeculationGate(GateRule(window=1, threshold=0.5, retry_steps=3))
    s = world(DraftPolicy(K, gate=gate))
    run(s, m=2)
    answer(s, take(s))
    assert gate.mean == 0.0
    run(s)
    assert take(s).no_drafts


def test_confidence_decides_how_wide_the_next_step_is() -> None:
    """A token more costs a tenth: drafts pay as long as they are likely enough."""
    per_s = [100.0 / (1 + 0.1 * n) for n in range(16)]
    s = world(DraftPolicy(K, calibration=calibration(*per_s)))
    run(s)
    first = take(s)
    assert lengths(first) == [3], "nothing is known yet"
    answer(s, first, (0.9, 0.05, 0.9))
    second = take(s)
    assert (second.group_len, lengths(second)) == (2, [1])
    answer(s, second, (0.01, 0.9, 0.9))
    third = take(s)
    assert (third.group_len, lengths(third), third.no_drafts) == (1, [0], False)
    answer(s, third, (0.99, 0.99, 0.99))
    assert lengths(take(s)) == [3]


def test_all_rows_share_the_width_and_pay_for_it_together() -> None:
    """Eight tokens are free and the ninth costs half: two rows may check 3 drafts, three rows 1."""
    per_s = [100.0] * 8 + [50.0] * 8
    s = world(DraftPolicy(K, calibration=calibration(*per_s)))
    requests = [run(s), run(s)]
    answer(s, take(s), (0.9, 0.9, 0.9))
    assert lengths(take(s)) == [3, 3]
    assert all(request.confidence == pytest.approx((0.9,) * 3) for request in requests)
    s = world(DraftPolicy(K, calibration=calibration(*per_s)))
    for _ in range(3):
        run(s)
    answer(s, take(s), (0.9, 0.9, 0.9))
    assert lengths(take(s)) == [1, 1, 1]


def test_a_row_that_just_started_counts_as_the_others_do_in_the_mean() -> None:
    """Arrivals must not widen every step: with many rows there is one in almost each of them."""
    per_s = [100.0 / (1 + 0.1 * n) for n in range(16)]
    s = world(DraftPolicy(K, calibration=calibration(*per_s)))
    run(s)
    answer(s, take(s), (0.01, 0.9, 0.9))
    run(s)
    plan = take(s)
    assert (len(plan.opened), lengths(plan)) == (1, [0, 0])
    answer(s, plan, (0.99, 0.99, 0.99))
    run(s)
    assert lengths(take(s)) == [3, 3, 3]


def test_confidences_are_calibrated_and_smoothed_when_they_are_late() -> None:
    hot = calibration(1.0, temperatures=(2.0, 1.0, 1.0))
    late = DraftPolicy(K, calibration=hot, is_stale=True)
    s = world(late)
    request = run(s)
    late.heard(request, 0, 0, (0.9, 0.5, 0.5))
    assert request.confidence == pytest.approx((0.75, 0.5, 0.5))  # logit 2.197 halved
    late.heard(request, 3, 1, (0.9, 1.0, 0.0))
    assert request.confidence == pytest.approx((0.75, 0.6, 0.4), abs=1e-5)
    late.heard(request, 2, 2, ())
    assert request.confidence == pytest.approx((0.75, 0.6, 0.4), abs=1e-5)
    late.heard(request, 0, 0, ())
    assert list(late.samples) == [((0.9, 0.5, 0.5), 1)], "only groups that were checked as a whole"


def test_11_confidence_of_an_earlier_tenant_of_a_row_is_never_used() -> None:
    """It is kept with the request, and the answer of a step in flight for one that left says nothing."""
    per_s = [100.0 / (1 + 0.1 * n) for n in range(16)]
    s = world(DraftPolicy(K, calibration=calibration(*per_s)), depth=2)
    first = run(s)
    answer(s, take(s), (0.01, 0.9, 0.9))
    assert first.confidence
    flying = take(s)
    assert lengths(flying) == [0]
    s.abort(first)
    answer(s, flying, (0.99, 0.99, 0.99))
    assert first.confidence[0] < 0.02
    second = run(s)
    assert second.confidence == second.told == ()
    plan = take(s)
    assert plan.rows[0].row.index == flying.rows[0].row.index
    assert lengths(plan) == [3]
