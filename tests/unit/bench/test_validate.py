"""`benchmarks/validate.py` without processes: calibration of the step model, comparison of answers, problems."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def points(module: Any) -> list[Any]:
    ranks = module("validate_ranks")
    return [
        ranks.Point(layout, n, rows, length, 8, 1.0, 1.0)
        for layout, n in (("one", 1), ("tp", 2), ("cp", 2))
        for rows in (1, 8)
        for length in (4096, 32768, 131072)
    ]


def test_a_calibration_explains_the_times_that_factors_made(module: Any) -> None:
    fits = module("validate_fit")
    model = module("validate_model").stand_in("cuda", 12)
    features = [fits.by_part(model, p) for p in points(module)]
    truth = dict.fromkeys(features[0], 2.0) | {"message": 30.0, "token": 3.0, "step": 0.7}
    attention = ("attention bytes", "attention operations")
    measured = [
        sum(truth[name] * value for name, value in row.items() if name not in attention)
        + max(truth[name] * row[name] for name in attention)
        for row in features
    ]

    found = fits.fit(features, measured)

    assert max(map(abs, found.errors)) < 0.02
    assert max(map(abs, found.held_out)) < 0.05


@pytest.mark.parametrize(
    "rows, whole", [(1, 16), (12, 16), (48, 64), (96, 128), (129, 256), (768, 768)]
)
def test_query_rows_fill_tiles(module: Any, rows: int, whole: int) -> None:
    assert module("validate_fit").tiled(rows) == whole


def test_a_factor_is_never_negative(module: Any) -> None:
    fits = module("validate_fit")
    rows = [{"a": 1.0, "b": 0.1 * i} for i in range(1, 6)]

    found = fits.fit(rows, [1.0 / i for i in range(1, 6)])

    assert min(found.factors.values()) >= 0


def test_cp_divides_the_bytes_of_keys_and_tp_their_operations(module: Any) -> None:
    fits, ranks = module("validate_fit"), module("validate_ranks")
    model = module("validate_model").stand_in("cuda", 12)
    one, tp, cp = (
        fits.by_part(model, ranks.Point(layout, n, 8, 131072, 8, 1.0, 1.0))
        for layout, n in (("one", 1), ("tp", 2), ("cp", 2))
    )

    assert tp["attention bytes"] == one["attention bytes"] == 2 * cp["attention bytes"]
    assert 2 * tp["attention operations"] == 2 * cp["attention operations"]
    assert one["attention operations"] == 2 * cp["attention operations"]
    assert tp["message"] < cp["message"]


def test_prefill_shares_gpus_only_where_none_is_left(module: Any) -> None:
    modes = module("validate_answers").modes

    placed = [(m.layout.cp, m.n_stages, m.layout.prefill, m.layout.decode) for m in modes(4)[2:]]

    assert placed == [(2, 2, "2,3", "0,1"), (4, 2, "0,1", "0,1,2,3")]
    assert [m.n_drafts for m in modes(1)] == [0, 7]


@pytest.mark.parametrize(
    "ids, truth, n",
    [((1, 2, 3), (1, 2, 3), 3), ((1, 9, 3), (1, 2, 3), 1), ((1,), (1, 2), 1), ((), (1,), 0)],
)
def test_agreement_ends_at_the_first_difference(
    module: Any, ids: tuple[int, ...], truth: tuple[int, ...], n: int
) -> None:
    assert module("validate_answers").agreed(ids, truth) == n


def mode(name: str, n_right: int, histogram: list[int]) -> dict[str, Any]:
    counts = dict.fromkeys(("n", "n_tokens", "n_exchanges", "equal", "n_agreed", "n_compared"), 100)
    suite = counts | {"n_right": n_right, "histogram": histogram}
    return {"name": name, "suites": {"lists": suite}}


@pytest.mark.parametrize(
    "n_right, histogram, n_problems", [(90, [50, 50], 0), (88, [50, 50], 1), (90, [60, 40], 1)]
)
def test_accuracy_and_acceptance_must_be_those_of_cp_1(
    module: Any, n_right: int, histogram: list[int], n_problems: int
) -> None:
    part = {
        "refusals": [{"words": "--cp 3", "status": 2, "n": 1}],
        "modes": [
            mode("plain", 90, []),
            mode("drafts", 90, [50, 50]),
            mode("cp 2", n_right, histogram),
        ],
    }

    assert len(module("validate_answers").problems(part)) == n_problems


def test_a_configuration_that_is_not_refused_is_a_problem(module: Any) -> None:
    part = {
        "refusals": [{"words": "--cp 3", "status": 0, "n": 0}],
        "modes": [mode("plain", 90, []), mode("drafts", 90, [1])],
    }

    assert module("validate_answers").problems(part) == ["not refused: --cp 3"]


@pytest.mark.parametrize(
    "kernel, name",
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "reduce"),
        ("ncclDevKernel_SendRecv", "exchange"),
        ("ncclDevKernel_AllGather_RING_LL", "gather"),
        ("attend_wide", "attention"),
        (
            "void legacy::sm90::flash_fwd_splitkv_mla_kernel<Traits<cutlass::bfloat16_t>>",
            "attention",
        ),
        ("_apply", "kda"),
        ("prepare_tile", "kda"),
        ("nvjet_sm90_tst_256x128", "products"),
        ("_rms_norm", "other"),
    ],
)
def test_kernels_have_a_class(module: Any, kernel: str, name: str) -> None:
    assert module("validate_ranks").class_of(kernel) == name


def test_a_command_is_told_without_the_places_of_files(module: Any) -> None:
    words = ["--parts", "steps", "--out", "/somewhere", "--add", "/old.json", "--alone", ""]

    told = module("validate").command(words)

    assert told == "python benchmarks/validate.py --parts steps --alone ''"
