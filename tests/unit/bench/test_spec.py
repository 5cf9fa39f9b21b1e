"""`k3-bench spec`: the flags of each mode, figures added up over answers, and what is shown of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import httpx
import pytest

from k3.bench import spec
from k3.bench.answers import Answer, Exchange, decode_seconds
from k3.bench.spec_report import (
    COSTS,
    FIGURES,
    TOTAL,
    Cost,
    Figures,
    as_json,
    cost_rows,
    figure_rows,
    gain,
    markdown,
    plot,
    with_totals,
)
from k3.bench.speculation import Acceptance
from k3.bench.suites import read

pytestmark = pytest.mark.dspark


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    spec.add_arguments(parser)
    return parser.parse_args(words)


def answer(
    tokens: int, acceptance: Acceptance | None, ids: tuple[int, ...] = (), error: str = ""
) -> Answer:
    item = read("copy", 1)[0]
    exchange = Exchange((1, 2), ids, 0.0, 0, 9, ends_itself=True)
    return Answer(item, True, "text", True, 9, tokens, 1.0, acceptance, error, (exchange,))


def test_only_the_mode_with_drafts_gives_prefill_the_drafter():
    options = {mode: spec.options(mode, arguments("--draft-tokens", "5")) for mode in spec.MODES}
    assert options["plain"].prefill_flags == options["plain"].decode_flags == ()
    assert options["drafts"].prefill_flags == ("--drafter", "draft-mla")
    assert options["blind"].prefill_flags == ()
    wanted = ("--drafter", "draft-mla", "--draft-tokens", "5")
    assert options["drafts"].decode_flags == options["blind"].decode_flags == wanted


def test_more_requests_in_flight_than_rows_get_rows():
    many = spec.options("plain", arguments("--concurrency", "1", "16"))
    assert many.decode_flags == ("--max-rows", "16")
    assert spec.options("plain", arguments("--concurrency", "8")).decode_flags == ()


def test_steps_of_all_answers_add_up_and_other_tokens_are_counted():
    found = spec.Measured()
    plain = [answer(3, None, (5, 6, 7)), answer(2, None, (8, 9))]
    figures = spec.summarize("copy", "plain", 1, plain, 1.0, found)
    assert (figures.acceptance, figures.n_different) == (None, 0)
    drafted = [
        answer(10, Acceptance((1, 0, 2)), (5, 6, 7)),
        answer(6, Acceptance((0, 1, 0)), (8, 1)),
    ]
    figures = spec.summarize("copy", "drafts", 1, drafted, 2.0, found)
    assert figures.tokens_per_s == 8.0
    assert figures.acceptance is not None
    assert figures.acceptance.length == pytest.approx(1 + 5 / 4)
    assert figures.n_different == 1
    assert spec.differences([(1, 2)], [(1, 2), (3,)]) == 1


def test_the_time_of_decoding_is_taken_from_the_servers_own_header():
    stages = {
        "Server-Timing": "queue;dur=0.1, prefill;dur=80.0, transfer;dur=2.0, decode;dur=125.5"
    }
    assert decode_seconds(httpx.Response(200, headers=stages)) == 0.1255
    assert decode_seconds(httpx.Response(200)) == 0.0


def test_a_missing_answer_is_an_error_and_not_a_figure():
    with pytest.raises(spec.K3Error, match=r"1 requests of copy failed: copy-0.*HTTP 503"):
        spec.summarize(
            "copy", "plain", 1, [answer(0, None, error="HTTP 503")], 1.0, spec.Measured()
        )


def figures() -> list[Figures]:
    taken = Acceptance((2, 0, 6))
    return [
        Figures("copy", "plain", 1, 4, 100, 10.0, None, 0, 96, 8.0),
        Figures("copy", "drafts", 1, 4, 100, 4.0, taken, 0, 96, 2.0),
        Figures("lists", "plain", 1, 2, 50, 5.0, None, 0),
        Figures("lists", "drafts", 1, 2, 50, 2.0, taken, 1),
    ]


def test_gains_are_against_plain_decoding_of_the_same_and_sums_against_sums():
    everything = with_totals(figures())
    total = next(f for f in everything if (f.suite, f.mode) == (TOTAL, "drafts"))
    assert (total.n_items, total.tokens_per_s, total.n_different) == (6, 25.0, 1)
    assert total.acceptance == Acceptance((4, 0, 12))
    assert gain(total, everything) == 2.5
    assert gain(figures()[1], figures()[1:]) is None
    rows = figure_rows(figures())
    assert all(len(row) == len(FIGURES) for row in rows)
    assert rows[1] == ["copy", "drafts", "1", "4", "25.0", "2.50", "48.0", "4.00", "2.500", "equal"]
    assert rows[-1][-1] == "1 DIFFER"


def test_costs_are_means_of_a_step_and_what_is_not_the_model_is_the_rest():
    [row] = cost_rows([Cost("drafts", 8, 4, 0.4, 0.3)])
    assert row == ["drafts", "8", "4", "100.00", "75.00", "25.00", "25%"]
    assert len(row) == len(COSTS)
    assert cost_rows([Cost("plain", 1, 0, 0.0, 0.0)])[0][3] == "0.00"


def test_files_hold_everything(tmp_path: Path):
    costs, facts = [Cost("drafts", 1, 4, 0.4, 0.3)], {"machine": "2 cores"}
    text = markdown(figures(), costs, facts)
    assert "- machine: 2 cores" in text
    assert "| lists | drafts | 1 | 2 | 25.0 | 2.50 | - | - | 2.500 | 1 DIFFER |" in text
    assert "| lists | drafts | 1 | 75 75 |" in text
    assert "| lists | plain | 1 | 75" not in text
    tree = json.loads(json.dumps(as_json(figures(), costs, facts)))
    assert tree["figures"][1]["gain"] == 2.5
    assert tree["figures"][1]["decode_gain"] == 4.0
    assert tree["figures"][1]["by_position"] == [0.75, 0.75]
    assert tree["steps"][0]["n_steps"] == 4
    plot(figures(), tmp_path / "gains.png")
    assert (tmp_path / "gains.png").read_bytes().startswith(b"\x89PNG")
