"""`k3-bench spec`: the flags of each mode, and figures added up over answers."""

from __future__ import annotations

import argparse

import pytest

from k3.bench import spec
from k3.bench.answers import Answer
from k3.bench.speculation import Acceptance
from k3.bench.suites import read

pytestmark = pytest.mark.dspark


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    spec.add_arguments(parser)
    return parser.parse_args(words)


def answer(tokens: int, acceptance: Acceptance | None) -> Answer:
    item = read("copy", 1)[0]
    return Answer(item, True, "text", True, 9, tokens, 1.0, acceptance, "")


def test_only_the_mode_with_drafts_gives_prefill_the_drafter():
    options = {mode: spec.options(mode, arguments("--draft-tokens", "5")) for mode in spec.MODES}
    assert options["plain"].prefill_flags == options["plain"].decode_flags == ()
    assert options["drafts"].prefill_flags == ("--drafter", "draft-mla")
    assert options["blind"].prefill_flags == ()
    wanted = ("--drafter", "draft-mla", "--draft-tokens", "5")
    assert options["drafts"].decode_flags == options["blind"].decode_flags == wanted


def test_steps_of_all_answers_add_up():
    answers = [answer(10, Acceptance((1, 0, 2))), answer(6, Acceptance((0, 1, 0))), answer(2, None)]
    figures = spec.summarize("copy", "drafts", answers, 2.0, is_equal=True)
    assert figures.tokens_per_s == 9.0
    assert figures.length == pytest.approx(1 + 5 / 4)
    assert figures.by_position == pytest.approx((0.75, 0.5))
    plain = spec.summarize("copy", "plain", [answer(3, None)], 1.0, is_equal=True)
    assert (plain.length, plain.by_position) == (None, ())
