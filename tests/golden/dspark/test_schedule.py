"""Verify lengths and calibrated confidences against recorded ones; the laws they follow."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file

from decode_svc.draft_schedule import schedule, width
from k3.calibration import Calibration, StepRates, calibrated, calibration_error, fit

pytestmark = pytest.mark.dspark

RECORDED = load_file(Path(__file__).with_name("schedule.safetensors"))
CASES = sorted({name.split(".")[0] for name in RECORDED})


def rates(case: str) -> StepRates:
    table = RECORDED[f"{case}.sps_table"].tolist()
    return StepRates(tuple(range(len(table))), tuple(table))


@pytest.mark.parametrize("case", CASES)
def test_verify_lengths_are_those_recorded(case: str) -> None:
    def get(name: str) -> list:
        return RECORDED[f"{case}.{name}"].tolist()

    confidence, temperatures = get("confidence"), get("sts_temperatures")
    assert schedule(confidence, rates(case)) == get("ell_early_stop")
    assert schedule(confidence, rates(case), stop_early=False) == get("ell_global")
    scaled = [calibrated(row, temperatures) for row in confidence]
    for row, recorded in zip(scaled, get("calibrated"), strict=True):
        assert row == pytest.approx(recorded, abs=1e-4)
    assert schedule(get("calibrated"), rates(case)) == get("ell_early_stop_sts")


@pytest.mark.parametrize("seed", range(20))
def test_the_global_choice_beats_every_other_choice_of_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    rows, k = rng.randint(1, 3), 3
    confidence = [[rng.random() for _ in range(k)] for _ in range(rows)]
    per_s = sorted((rng.uniform(1, 9) for _ in range(rows * (k + 1) + 1)), reverse=True)
    table = StepRates(tuple(range(len(per_s))), tuple(per_s))

    def gain(lengths: tuple[int, ...]) -> float:
        expected = float(rows)
        for row, n in zip(confidence, lengths, strict=True):
            reach = 1.0
            for c in row[:n]:
                reach *= c
                expected += reach
        return expected * table.at(rows + sum(lengths))

    found = gain(tuple(schedule(confidence, table, stop_early=False)))
    best = max(map(gain, itertools.product(range(k + 1), repeat=rows)))
    assert found == pytest.approx(best), f"seed {seed}"


def test_time_grows_evenly_between_measured_sizes_and_in_proportion_beyond() -> None:
    table = StepRates((4, 8, 16), (100.0, 50.0, 40.0))
    assert [table.at(n) for n in (1, 4, 8, 16, 32)] == [100.0, 100.0, 50.0, 40.0, 20.0]
    assert table.at(5) == pytest.approx(1 / 0.0125)
    assert table.at(14) == pytest.approx(1 / 0.02375)


def test_likely_drafts_are_checked_beyond_the_next_measured_size() -> None:
    """20 tokens do not cost what 32 do: else the search would end with three drafts for each of four rows."""
    table = StepRates((8, 16, 32), (1 / 0.076, 1 / 0.090, 1 / 0.120))
    assert width([[0.9] * 7] * 4, 4, table) == 7
    assert schedule([[0.9] * 7] * 4, table) == [7] * 4


def test_drafts_break_even_where_their_wider_steps_are_slower_than_plain_ones() -> None:
    """Eight rows without drafts are another step than one row with seven, although both check eight tokens."""
    drafting, plain = StepRates((8, 64), (50.0, 10.0)), StepRates((1, 8), (100.0, 80.0))
    found = Calibration("d", (1.0,), drafting, plain)
    assert found.break_even(1, 8) == pytest.approx(1.0)
    assert found.break_even(8, 8) == pytest.approx(7.0)
    free = StepRates((64,), (95.0,))
    assert Calibration("d", (1.0,), free, plain).break_even(3, 8) == 0.0


def test_free_drafts_are_all_checked_and_costly_ones_are_not() -> None:
    confidence = [[0.5, 0.5, 0.5], [0.9, 0.9, 0.9]]
    assert schedule(confidence, StepRates((64,), (10.0,))) == [3, 3]
    steep = StepRates(tuple(range(9)), tuple(2.0**-n for n in range(9)))
    assert schedule(confidence, steep) == [0, 0]
    assert schedule([], StepRates((1,), (1.0,))) == []


def test_fitted_temperatures_undo_an_over_confident_head() -> None:
    """Blocks whose drafts are accepted with the probability of a head at temperature 2, told at temperature 1."""
    rng = random.Random(3)
    told: list[list[float]] = []
    accepted: list[int] = []
    for _ in range(3000):
        row = [rng.uniform(0.5, 0.99) for _ in range(3)]
        n = 0
        for true in calibrated(row, [2.0, 1.0, 2.5]):
            if rng.random() >= true:
                break
            n += 1
        told.append(row)
        accepted.append(n)
    found = fit(told, accepted)
    assert found == pytest.approx((2.0, 1.0, 2.5), abs=0.5)
    came = [n > 0 for n in accepted]
    raw = calibration_error([row[0] for row in told], came)
    after = calibration_error([calibrated(row, found)[0] for row in told], came)
    assert after < 0.25 * raw
