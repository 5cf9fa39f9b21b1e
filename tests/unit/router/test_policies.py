"""Which instance comes first under each policy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from router.fleet.pairing import InstanceView, Need
from router.fleet.policies import decode_policies, prefill_policies
from router.fleet.prefix import PromptPages

ONE = InstanceView("p1", "p1:1", "layout", "digest", pages_total=20)
MANY = [replace(ONE, instance_id=f"p{n}", address=f"p{n}:1") for n in range(12)]
RNG_SEED = 5


def first(policy: str, views: list[InstanceView], need: Need) -> str:
    order = prefill_policies(random.Random(RNG_SEED))[policy].order(views, need)
    assert sorted(view.instance_id for view in order) == sorted(v.instance_id for v in views)
    return order[0].instance_id


def need(session: str = "", ids: tuple[int, ...] = tuple(range(100))) -> Need:
    return Need(len(ids), 5, pages=PromptPages(ids, b""), session=session)


@pytest.mark.parametrize(
    ("usable", "waiting", "expected"),
    [
        ((0, 64), (0, 0), "p1"),  # the cache decides
        ((0, 64), (0, 63), "p1"),
        ((0, 64), (0, 65), "p0"),  # a queue longer than what the cache saves
        ((500, 100), (0, 0), "p0"),  # more than the prompt saves no more than the prompt: a tie
    ],
)
def test_cache_aware_weighs_cached_tokens_against_waiting_ones(
    usable: tuple[int, int], waiting: tuple[int, int], expected: str
) -> None:
    views = [
        replace(view, usable_tokens=u, waiting_tokens=w)
        for view, u, w in zip(MANY, usable, waiting, strict=False)
    ]
    assert first("cache_aware", views, need()) == expected


def test_a_tie_goes_to_fewer_in_flight() -> None:
    views = [replace(MANY[0], in_flight=2), MANY[1]]
    assert first("cache_aware", views, need()) == "p1"


@pytest.mark.parametrize(
    ("usable", "waiting", "running", "expected"),
    [
        ((0, 64), (0, 0), (0, 1), "p1"),  # two wait for 36 tokens, one would wait for 100
        ((0, 64), (0, 0), (0, 3), "p0"),  # four would wait
        ((0, 64), (0, 65), (0, 0), "p0"),
        ((0, 0), (7, 7), (3, 0), "p1"),
        ((200, 100), (0, 0), (3, 0), "p1"),  # nothing to compute at either: the less loaded one
    ],
)
def test_decode_that_computes_prompts_is_chosen_by_the_delay_of_all_that_are_there(
    usable: tuple[int, int], waiting: tuple[int, int], running: tuple[int, int], expected: str
) -> None:
    views = [
        replace(view, usable_tokens=u, waiting_tokens=w, running=r, max_rows=4)
        for view, u, w, r in zip(MANY, usable, waiting, running, strict=False)
    ]
    policy = decode_policies(random.Random(RNG_SEED))["cache_aware"]
    assert policy.order(views, need())[0].instance_id == expected


def test_prompts_with_one_long_beginning_spread_over_decode_instances() -> None:
    """The first ones meet at one instance; it is not left to fill up while others are empty."""
    policy = decode_policies(random.Random(RNG_SEED))["cache_aware"]
    running = dict.fromkeys((view.instance_id for view in MANY[:4]), 0)
    for n in range(60):
        views = [
            replace(
                view,
                usable_tokens=90 if running[view.instance_id] else 0,
                running=running[view.instance_id],
                max_rows=60,
            )
            for view in MANY[:4]
        ]
        running[policy.order(views, need())[0].instance_id] += 1
        assert n >= 9 or list(running.values()).count(0) == 3
    assert set(running.values()) == {15}


@pytest.mark.parametrize("policy", sorted(prefill_policies(random.Random(0))))
def test_every_prefill_policy_orders_all_instances(policy: str) -> None:
    first(policy, MANY, need("a session"))


@pytest.mark.parametrize("policy", sorted(decode_policies(random.Random(0))))
def test_every_decode_policy_names_each_instance_once(policy: str) -> None:
    order = decode_policies(random.Random(RNG_SEED))[policy].order(MANY, need("a session"))
    assert sorted(v.instance_id for v in order) == sorted(v.instance_id for v in MANY)


def test_a_session_stays_when_other_instances_come_and_go() -> None:
    for n in range(20):
        home = first("session", MANY, need(f"session {n}"))
        others = [view for view in MANY if view.instance_id != home]
        assert first("session", MANY[::-1], need(f"session {n}")) == home
        smaller = [view for view in MANY if view is not others[0]]
        assert first("session", smaller, need(f"session {n}")) == home


def test_sessions_spread_over_the_instances() -> None:
    homes = {first("session", MANY, need(f"session {n}")) for n in range(200)}
    assert len(homes) == len(MANY)


def test_without_a_session_the_cache_decides() -> None:
    views = [MANY[0], replace(MANY[1], usable_tokens=64)]
    assert first("session", views, need()) == "p1"


def test_prompts_that_begin_alike_meet_at_one_instance() -> None:
    beginning = tuple(range(64))
    homes = {first("prefix", MANY, need(ids=(*beginning, n))) for n in range(20)}
    assert len(homes) == 1
    assert len({first("prefix", MANY, need(ids=(n, *beginning))) for n in range(60)}) > 6


def test_the_less_loaded_of_two_wins() -> None:
    views = [replace(MANY[0], waiting_tokens=9), MANY[1]]
    assert first("power_of_two", views, need()) == "p1"
