"""When speculation is closed, when it is tried again, and that the bar follows the batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_svc.gate import LONGEST_WAIT, GateRule, SpeculationGate
from k3.types import Speculation

pytestmark = pytest.mark.dspark

RULE = GateRule(window=3, threshold=1.0, retry_steps=5)


def ended(n_accepted: int, n_steps: int = 4) -> Speculation:
    """A request whose steps accepted `n_accepted` drafts each."""
    histogram = [0] * 8
    histogram[n_accepted] = n_steps
    return Speculation(tuple(histogram), 7 * n_steps)


def feed(gate: SpeculationGate, *accepted: int) -> None:
    for n in accepted:
        gate.finished(ended(n))


def closed_steps(gate: SpeculationGate) -> int:
    """Steps until the gate opens."""
    return next(n for n in range(1, 10_000) if gate.decide(1))


def test_nothing_is_decided_before_enough_requests_have_ended():
    gate = SpeculationGate(RULE)
    feed(gate, 0, 0)
    assert gate.decide(4)
    assert gate.mean is None
    feed(gate, 0)
    assert not gate.decide(4)
    assert gate.mean == 0.0


def test_the_newest_requests_count_and_the_bar_itself_is_enough():
    gate = SpeculationGate(RULE)
    feed(gate, 7, 0, 0, 3)
    assert gate.mean == 1.0
    assert gate.decide(1)
    feed(gate, 0)
    assert gate.mean == 1.0
    feed(gate, 1)
    assert gate.mean == pytest.approx(4 / 3)
    feed(gate, 0, 0)
    assert not gate.decide(1)


def test_requests_without_drafts_say_nothing():
    gate = SpeculationGate(RULE)
    for _ in range(9):
        gate.finished(Speculation((0,) * 8, 0))
        gate.finished(None)
    assert gate.mean is None
    assert gate.decide(1)


def test_a_closed_gate_is_tried_again_on_an_empty_window_and_later_each_time():
    gate = SpeculationGate(RULE)
    feed(gate, 0, 0, 0)
    assert not gate.decide(1)
    waits: list[int] = []
    for _ in range(9):
        waits.append(closed_steps(gate))
        assert gate.mean is None
        feed(gate, 0, 0)
        assert gate.decide(1), "a trial lasts until its window is full"
        feed(gate, 0)
        assert not gate.decide(1)
    assert waits == [5 * min(2**n, LONGEST_WAIT) for n in range(9)]


def test_a_trial_that_pays_forgets_the_failed_ones():
    gate = SpeculationGate(RULE)
    feed(gate, 0, 0, 0)
    gate.decide(1)
    closed_steps(gate)
    feed(gate, 0, 0, 0)
    gate.decide(1)
    assert closed_steps(gate) == 10
    feed(gate, 4, 4, 4)
    assert gate.decide(1)
    feed(gate, 0, 0, 0)
    assert not gate.decide(1)
    assert closed_steps(gate) == 5


def test_the_bar_follows_the_batch_with_some_distance_between_closing_and_opening():
    gate = SpeculationGate(RULE, lambda n_rows: n_rows / 2)
    feed(gate, 2, 2, 2)
    assert gate.decide(4)  # breaks even
    assert not gate.decide(5)
    assert not gate.decide(4), "opening needs more than breaking even"
    assert gate.decide(3)
    assert gate.decide(4)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 16)), max_size=60))
def test_closing_needs_a_full_window_below_the_bar(story: list[tuple[int, int]]):
    gate = SpeculationGate(RULE, lambda n_rows: n_rows / 8)
    for accepted, n_rows in story:
        was_open = gate.is_open
        feed(gate, accepted)
        if was_open and not gate.decide(n_rows):
            assert gate.mean is not None
            assert gate.mean < max(RULE.threshold, n_rows / 8)
