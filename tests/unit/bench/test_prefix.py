"""`k3-bench prefix`: the flags of each mode, and what a turn saves."""

from __future__ import annotations

import argparse

import pytest

from k3.bench import prefix
from k3.bench.prefix import Saving, Turn

pytestmark = pytest.mark.prefill


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    prefix.add_arguments(parser)
    return parser.parse_args(words)


def turn(computed: int, seconds: float, *, wanted: int = 0, hit: int = 0) -> Turn:
    return Turn(8, 100, wanted, wanted, hit, computed, seconds, "text")


def test_only_prefill_is_told_of_the_cache() -> None:
    given = arguments("--interval", "64", "--pp", "2", "--model", "m")
    off, on = (prefix.options(mode, given) for mode in prefix.MODES)
    assert off.decode_flags == on.decode_flags == ("--model", "m")
    assert off.prefill_flags == ("--model", "m", "--parallel-pp", "2", "--cache-prefix", "off")
    assert on.prefill_flags[5:] == ("on", "--cache-checkpoint-interval", "64")


def test_a_turn_is_weighed_in_tokens_and_seconds_and_says_what_it_lost() -> None:
    saving = Saving(off=turn(100, 2.0), on=turn(15, 0.5, wanted=96, hit=80))
    assert saving.token_share == pytest.approx(0.15)
    assert saving.time_share == pytest.approx(0.25)
    assert saving.on.lost == 16
