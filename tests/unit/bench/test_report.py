"""Percentiles, throughput and goodput of known records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.bench.load import Record
from k3.bench.report import Slo, plot, quantile, spread, summarize


def record(**changes: object) -> Record:
    values: dict[str, object] = {
        "started_s": 0.0,
        "ttft_s": 0.1,
        "total_s": 0.5,
        "prompt_tokens": 7,
        "output_tokens": 5,
        "gaps_s": (0.1, 0.1, 0.1, 0.1),
        "finish_reason": "stop",
        "error": "",
    }
    return Record(**(values | changes))  # type: ignore[arg-type]


def test_quantile_interpolates_between_the_two_closest_values() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == pytest.approx(2.5)
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.9) == pytest.approx(4.6)


def test_quantiles_of_nothing_and_of_one_value() -> None:
    assert quantile([], 0.99) == 0.0
    assert spread([3.0]).p99 == 3.0
    assert spread([]).max == 0.0


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_ordered_and_within_the_values(values: list[float]) -> None:
    s = spread(values)
    assert min(values) <= s.p50 <= s.p90 <= s.p95 <= s.p99 <= s.max == max(values)


def test_tokens_per_second_counts_complete_requests_over_the_whole_run() -> None:
    records = [record(), record(started_s=1.5), record(error="HTTP 429: queue_full", total_s=0.0)]
    report = summarize(records, Slo(1.0, 1.0))
    assert report.duration_s == pytest.approx(2.0)
    assert report.output_tokens_per_s == pytest.approx(5.0)
    assert report.errors == {"HTTP 429: queue_full": 1}
    assert report.n_complete == 2


def test_goodput_counts_requests_that_keep_both_limits() -> None:
    late = record(ttft_s=0.4)
    slow = record(total_s=0.9)
    report = summarize([record(), late, slow], Slo(ttft_s=0.2, tpot_s=0.15))
    assert report.share_within_slo == pytest.approx(1 / 3)


def test_a_run_without_a_complete_request_is_reported_not_divided_by_zero() -> None:
    report = summarize([record(error="transport: ConnectError")], Slo(1.0, 1.0))
    assert report.output_tokens_per_s == 0.0
    json.dumps(report.as_json({"requests": 1}))


def test_the_plot_is_a_png_even_for_one_request(tmp_path: Path) -> None:
    plot([record()], tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
