"""When an answer is right, what a suite file may hold, and how accepted drafts add up."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.bench.scoring import is_right, response_of
from k3.bench.speculation import Acceptance
from k3.bench.suites import NAMES, choose, longest_answer, read
from k3.errors import ConfigError

RAW = "<|close|>think<|sep|><|open|>response<|sep|>Answer: 7<|close|>response<|sep|><|end_of_msg|>"


def line(**changes: object) -> str:
    turns = [{"role": "user", "content": "How many?"}]
    fields = {"id": "s-0", "turns": turns, "tools": None, "answer": "7", "check": "response"}
    return json.dumps(fields | changes) + "\n"


@pytest.mark.parametrize(
    "response, right",
    [
        ("Answer: 7", True),
        ("Answer: 6\nso\nAnswer: 7", True),
        ("Answer: 7\nAnswer: 6", False),
        ("Answer: 7.", False),
        ("7", False),
        ("", False),
    ],
)
def test_the_last_answer_line_counts(response: str, right: bool) -> None:
    assert is_right("answer_line", "Answer: 7", response=response) is right


def test_a_response_and_a_raw_answer_must_be_equal_to_the_byte() -> None:
    assert is_right("response", "7", response="7") is True
    assert is_right("response", "7", response="7 ") is False
    assert is_right("raw", RAW, response="", raw=RAW) is True
    assert is_right("raw", RAW, response="", raw=RAW[:-1]) is False


def test_an_item_without_gold_answer_is_not_scored_and_an_unknown_check_is_an_error() -> None:
    assert is_right("none", None, response="x") is None
    with pytest.raises(ValueError, match="close_enough"):
        is_right("close_enough", "7", response="7")


def test_the_response_is_what_stands_in_its_channel() -> None:
    assert response_of(RAW) == "Answer: 7"
    assert response_of(RAW.partition("<|close|>response")[0]) == "Answer: 7"
    assert response_of("Answer: 7") == ""


@pytest.mark.parametrize("name", NAMES)
def test_every_frozen_suite_reads_and_its_gold_answers_fit_the_limit(name: str) -> None:
    items = read(name)
    assert len(items) >= 200
    assert len({item.id for item in items}) == len(items)
    # At least two characters a token in every gold answer, tags aside.
    assert max(len(item.answer or "") for item in items) < 4 * longest_answer(name)


def test_a_suite_is_read_packed_or_plain_and_as_far_as_asked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line() + line(id="s-1") + line(id="s-2"))
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress(line().encode()))
    assert [item.id for item in read("a", 2, tmp_path)] == ["s-0", "s-1"]
    assert len(read("a", 0, tmp_path)) == 3
    assert read("b", 5, tmp_path)[0].answer == "7"


@pytest.mark.parametrize(
    "bad, why",
    [
        ("[]\n", "line 2"),
        (line(check="close_enough"), "close_enough"),
        (line(answer=None), "with answer None"),
        (line(check="none"), "with answer '7'"),
    ],
)
def test_a_line_that_is_no_item_is_named(tmp_path: Path, bad: str, why: str) -> None:
    (tmp_path / "a.jsonl").write_text(line() + bad)
    with pytest.raises(ConfigError, match=why):
        read("a", 0, tmp_path)
    with pytest.raises(ConfigError, match="no suite 'c'"):
        read("c", 0, tmp_path)


def test_suites_are_chosen_by_name_once_each() -> None:
    assert choose("all") == NAMES
    assert choose("copy, lists,copy") == ("copy", "lists")
    assert len(choose("recall")) == 6
    assert choose("copy,arithmetic,arith_seen")[:2] == ("copy", "arith_seen")
    with pytest.raises(ConfigError, match="'nope'"):
        choose("copy,nope")


def test_acceptance_counts_the_bonus_token_and_positions_from_one() -> None:
    a = Acceptance((1, 0, 3))  # one step accepted none, three accepted both
    assert a.n_steps == 4
    assert a.length == pytest.approx(2.5)
    assert a.by_position == (0.75, 0.75)
    assert Acceptance.none(2).length == 0.0
    assert Acceptance.none(2).by_position == ()


def test_acceptance_is_read_from_an_answer_that_reports_it() -> None:
    body = {"metrics": {"speculative_decoding": {"acceptance_histogram": [2, 5]}}}
    assert Acceptance.of_body(body) == Acceptance((2, 5))
    assert Acceptance.of_body({"choices": []}) is None


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1))
def test_the_length_is_one_plus_the_sum_over_positions(histograms: list[list[int]]) -> None:
    total = Acceptance.none(3)
    for h in histograms:
        total = total.plus(Acceptance(tuple(h)))
    if total.n_steps:
        assert total.length == pytest.approx(1 + sum(total.by_position))
        assert list(total.by_position) == sorted(total.by_position, reverse=True)
