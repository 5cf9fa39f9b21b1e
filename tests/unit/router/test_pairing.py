"""Pairing is pure: views in, pair or reason out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_svc.capacity import worst_len
from router.fleet.pairing import (
    InstanceView,
    Need,
    NoPair,
    Pair,
    can_ever_decode,
    capacity_tokens,
    choose,
    pages_needed,
    same_layout,
    worst_tokens,
)
from router.fleet.policies import LeastLoadedDecode, RoundRobin, make_rules

DECODE = InstanceView(
    "d1", "d1:1", "layout", "digest", max_model_len=1000, max_rows=4, pages_free=20, pages_total=20,
    slots_free=4, depth=2,
)  # fmt: skip
PREFILL = replace(DECODE, instance_id="p1", address="p1:1")
RULES = make_rules("least_load", "least_load", 2, random.Random(1))
NEED = Need(prompt_len=30, max_tokens=20)


def pick(
    need: Need = NEED,
    prefills: list[InstanceView] | None = None,
    decodes: list[InstanceView] | None = None,
) -> Pair | NoPair:
    prefills = [PREFILL] if prefills is None else prefills
    return choose(need, prefills, [DECODE] if decodes is None else decodes, RULES, same_layout)


@pytest.mark.parametrize(
    ("need", "draft_tokens", "depth", "tokens"),
    [
        (Need(5, 1), 3, 2, 5),  # ends with the token of prefill: nothing is ever decoded
        (Need(5, 2), 0, 1, 6),
        (Need(5, 2), 0, 2, 7),
        (Need(5, 10), 3, 2, 21),
    ],
)
def test_worst_case_is_prompt_output_and_the_slack_of_steps_in_flight(
    need: Need, draft_tokens: int, depth: int, tokens: int
) -> None:
    assert worst_tokens(need, draft_tokens, depth) == tokens


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 15), st.integers(1, 3))
def test_the_router_expects_what_decode_reserves(n: int, m: int, drafts: int, depth: int) -> None:
    assert worst_tokens(Need(n, m), drafts, depth) == worst_len(n, m, drafts, depth - 1)


@given(st.integers(1, 400), st.integers(0, 4), st.integers(1, 3), st.sampled_from([4, 16, 64]))
def test_the_default_output_limit_always_fits_the_instance(
    prompt_len: int, draft_tokens: int, depth: int, group_tokens: int
) -> None:
    view = replace(DECODE, draft_tokens=draft_tokens, depth=depth, group_tokens=group_tokens)
    view = replace(view, max_model_len=10**6)
    room = capacity_tokens(view) - prompt_len
    if room >= 1:
        assert can_ever_decode(Need(prompt_len, room), view)


def test_a_pair_names_decode_and_prefills_in_order() -> None:
    busy = replace(PREFILL, instance_id="p2", waiting_tokens=9)
    idle = replace(PREFILL, instance_id="p3", waiting_tokens=1)
    pair = pick(prefills=[busy, idle])
    assert isinstance(pair, Pair)
    assert [view.instance_id for view in pair.prefills] == ["p3", "p2"]


def test_no_more_candidates_are_named_than_retries_allow() -> None:
    pair = pick(prefills=[replace(PREFILL, instance_id=f"p{n}") for n in range(7)])
    assert isinstance(pair, Pair)
    assert len(pair.prefills) == 3


def test_reasons_when_there_is_no_pair() -> None:
    assert pick(decodes=[]) is NoPair.NO_DECODE
    assert pick(prefills=[]) is NoPair.NO_PREFILL
    assert pick(prefills=[replace(PREFILL, layout_fingerprint="other")]) is NoPair.NO_PREFILL
    assert pick(decodes=[replace(DECODE, model_digest="other")]) is NoPair.NO_PREFILL
    assert pick(Need(990, 20)) is NoPair.NEVER_FITS
    assert pick(Need(300, 30)) is NoPair.NEVER_FITS  # 21 of 20 pages
    assert pick(decodes=[replace(DECODE, pages_free=3)]) is NoPair.FULL
    assert pick(decodes=[replace(DECODE, slots_free=0)]) is NoPair.FULL


def test_caches_are_looked_at_only_once_decode_has_room() -> None:
    """A request that waits is asked about at every change of the load, and its prompt may be long."""
    seen: list[str] = []

    def look(view: InstanceView) -> InstanceView:
        seen.append(view.instance_id)
        return view

    other = replace(PREFILL, instance_id="p2", address="p2:1", layout_fingerprint="other")
    for pages_free, result, looked_at in (
        (0, NoPair.FULL, []),
        (20, Pair(DECODE, (PREFILL,)), ["p1"]),
    ):
        decode = replace(DECODE, pages_free=pages_free)
        found = choose(NEED, [PREFILL, other], [decode], RULES, same_layout, look)
        assert (found, seen) == (result, looked_at)


def test_a_prompt_that_no_prefill_can_hold_never_fits() -> None:
    assert pick(prefills=[replace(PREFILL, pages_total=1)]) is NoPair.NEVER_FITS


def test_all_samples_must_fit_but_no_more_than_could_ever_run_at_once() -> None:
    pages = pages_needed(NEED, DECODE)
    three = replace(NEED, n_samples=3)
    assert pick(three, decodes=[replace(DECODE, pages_free=3 * pages - 1)]) is NoPair.FULL
    assert isinstance(pick(replace(NEED, n_samples=16)), Pair)


def test_a_suspect_is_chosen_only_when_nobody_else_is_there() -> None:
    suspect = replace(DECODE, is_suspect=True)
    loaded = replace(DECODE, instance_id="d2", pages_free=4)
    pair = pick(decodes=[suspect, loaded])
    assert isinstance(pair, Pair)
    assert pair.decode.instance_id == "d2"
    pair = pick(decodes=[suspect])
    assert isinstance(pair, Pair)
    assert pair.decode.instance_id == "d1"


def test_least_load_weighs_pages_and_rows() -> None:
    views = [
        replace(DECODE, instance_id="pages", pages_free=5),
        replace(DECODE, instance_id="rows", running=2),
        replace(DECODE, instance_id="idle"),
    ]
    order = LeastLoadedDecode(random.Random(0)).order(views, NEED)
    assert [view.instance_id for view in order] == ["idle", "rows", "pages"]


def test_among_many_the_better_of_two_random_ones_is_first() -> None:
    views = [replace(DECODE, instance_id=f"d{n:02}", running=n) for n in range(20)]
    policy = LeastLoadedDecode(random.Random(3))
    firsts = {policy.order(views, NEED)[0].instance_id for _ in range(50)}
    assert len(firsts) > 5
    assert "d19" not in firsts


def test_round_robin_takes_each_in_turn_and_survives_changes() -> None:
    views = [replace(DECODE, instance_id=name) for name in ("a", "b", "c")]
    policy = RoundRobin()
    assert [policy.order(views, NEED)[0].instance_id for _ in range(4)] == ["a", "b", "c", "a"]
    assert policy.order(views[::2], NEED)[0].instance_id == "c"


def test_a_suspect_does_not_stop_the_turns_of_the_others() -> None:
    """It comes last among the candidates, and is none of the turns."""
    names = ("a", "b", "c", "d")
    views = [replace(PREFILL, instance_id=name, is_suspect=name == "d") for name in names]
    rules = make_rules("least_load", "round_robin", 9, random.Random(0))
    pairs = [choose(NEED, views, [DECODE], rules, same_layout) for _ in range(4)]
    orders = [
        [view.instance_id for view in pair.prefills] for pair in pairs if isinstance(pair, Pair)
    ]
    assert [order[0] for order in orders] == ["a", "b", "c", "a"]
    assert all(order[-1] == "d" for order in orders)


@pytest.mark.prefill
def test_what_decode_computes_itself_needs_no_prefill_instance() -> None:
    alone = replace(DECODE, instance_id="alone", local_prefill_max=DECODE.max_model_len)
    pair = pick(prefills=[], decodes=[alone])
    assert isinstance(pair, Pair)
    assert (pair.decode.instance_id, pair.prefills) == ("alone", ())
    assert alone.is_alone
    stranger = replace(PREFILL, layout_fingerprint="other")
    assert isinstance(pick(prefills=[stranger], decodes=[alone]), Pair)


@pytest.mark.prefill
def test_of_instances_that_compute_the_prompt_the_one_with_most_of_it_cached_is_chosen() -> None:
    """Others have nothing that could be looked at."""
    rules = make_rules("cache_aware", "cache_aware", 2, random.Random(1))
    alone = replace(DECODE, local_prefill_max=DECODE.max_model_len)
    decodes = [replace(alone, instance_id=f"alone-{n}") for n in range(3)]
    plain = replace(DECODE, instance_id="plain")
    seen: list[str] = []

    def look(view: InstanceView) -> InstanceView:
        seen.append(view.instance_id)
        return replace(view, usable_tokens=16 if view.instance_id == "alone-1" else 0)

    pair = choose(NEED, [PREFILL], [plain, *decodes], rules, same_layout, look)
    assert isinstance(pair, Pair)
    assert (pair.decode.instance_id, pair.prefills) == ("alone-1", ())
    assert seen == ["alone-0", "alone-1", "alone-2"]


@pytest.mark.prefill
def test_prompts_beyond_the_bound_of_decode_go_to_a_prefill_instance() -> None:
    short = replace(DECODE, local_prefill_max=NEED.prompt_len)
    pair = pick(decodes=[short])
    assert isinstance(pair, Pair)
    assert pair.prefills == ()
    pair = pick(replace(NEED, prompt_len=NEED.prompt_len + 1), decodes=[short])
    assert isinstance(pair, Pair)
    assert pair.prefills == (PREFILL,)
    assert pick(replace(NEED, prompt_len=99), [], [short]) is NoPair.NO_PREFILL
    assert not short.is_alone
