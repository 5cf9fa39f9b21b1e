"""Which stretches of decode's histograms count as steps of one batch size."""

from __future__ import annotations

import pytest

from k3.bench.step import Reading, together


def stretch(n_steps: int, rows: int, seconds: float = 1.0) -> Reading:
    return Reading(seconds, n_steps * rows, n_steps, 0.02 * n_steps, 0.01 * n_steps)


def test_only_full_stretches_between_full_ones_count() -> None:
    ramp, idle_end = stretch(3, 1), stretch(1, 4, seconds=9.0)
    stretches = [ramp, stretch(2, 4), stretch(5, 4), stretch(7, 4), idle_end, stretch(2, 3)]
    total = together(stretches, batch=4)
    assert (total.n_steps, total.at_s) == (12, 2.0)
    assert total.forward_s == pytest.approx(0.12)


def test_a_stretch_with_steps_of_another_size_is_left_out_with_its_neighbours() -> None:
    mixed = Reading(1.0, 4 + 3, 2, 0.04, 0.02)
    full = stretch(5, 4)
    assert together([full, full, mixed, full, full], batch=4).n_steps == 0
    assert together([full, full, full], batch=4).n_steps == 5


def test_nothing_measured_is_zero_steps() -> None:
    assert together([], batch=1).n_steps == 0
