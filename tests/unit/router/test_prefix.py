"""What the router knows of prefix caches, exactly and roughly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.cache import hash_chain
from k3.v1 import instance_pb2
from router.fleet.cache_events import CacheFollower, CacheGap
from router.fleet.prefix import ROUTED_TTL_S, CacheView, PromptPages, RoutedPrompts

pytestmark = pytest.mark.prefill

CHAIN = tuple(bytes([n]) * 16 for n in range(1, 8))
Snapshot, Event = instance_pb2.CacheSnapshot, instance_pb2.CacheEvent


def watch(
    *events: instance_pb2.CacheEvent, snapshot: instance_pb2.CacheSnapshot | None = None
) -> instance_pb2.WatchResponse:
    return instance_pb2.WatchResponse(cache_events=events, cache_snapshot=snapshot)


def stored(seq: int, pages: tuple[bytes, ...], checkpoints: tuple[bytes, ...] = ()) -> Event:
    return Event(seq=seq, stored=instance_pb2.PagesStored(hashes=pages, checkpoints=checkpoints))


def following(*messages: instance_pb2.WatchResponse) -> CacheView:
    view, follower = CacheView(), CacheFollower()
    for message in messages:
        follower.apply(message, view)
    return view


EMPTY = watch(snapshot=Snapshot(seq=4, first=True, last=True))


def test_pages_without_a_checkpoint_are_of_no_use() -> None:
    view = following(EMPTY, watch(stored(5, CHAIN[:4])))
    assert view.usable_pages(CHAIN) == 0


def test_a_prompt_can_use_pages_up_to_the_deepest_checkpoint_among_those_in_one_piece() -> None:
    view = following(EMPTY, watch(stored(5, CHAIN[:3] + CHAIN[4:], (CHAIN[0], CHAIN[1], CHAIN[5]))))
    assert view.usable_pages(CHAIN) == 2
    assert view.usable_pages(CHAIN[:1]) == 1
    assert view.usable_pages(CHAIN[1:]) == 1  # another chain that begins with a known page


def test_what_was_removed_is_of_no_use_any_more() -> None:
    removed = instance_pb2.PagesRemoved(hashes=CHAIN[1:2], checkpoints=CHAIN[1:2])
    view = following(
        EMPTY, watch(stored(5, CHAIN, CHAIN[:2])), watch(Event(seq=6, removed=removed))
    )
    assert view.usable_pages(CHAIN) == 1


def test_a_snapshot_in_parts_replaces_everything_known() -> None:
    view = following(
        EMPTY,
        watch(stored(5, CHAIN, CHAIN)),
        watch(snapshot=Snapshot(seq=9, first=True, pages=CHAIN[:1])),
        watch(
            stored(10, CHAIN[2:3], CHAIN[2:3]),
            snapshot=Snapshot(seq=9, last=True, pages=CHAIN[1:2], checkpoints=CHAIN[:2]),
        ),
    )
    assert view.usable_pages(CHAIN) == 3
    assert view.n_pages == 3


def test_a_view_is_whole_only_after_the_last_part_of_a_snapshot() -> None:
    view, follower = CacheView(), CacheFollower()
    assert view.is_whole  # of an instance that tells of no cache: it has none
    follower.apply(watch(snapshot=Snapshot(seq=9, first=True, pages=CHAIN[:1])), view)
    assert not view.is_whole
    follower.apply(watch(snapshot=Snapshot(seq=9, last=True)), view)
    assert view.is_whole
    view.lose()
    assert not view.is_whole
    assert view.n_pages == 0


def test_a_cleared_cache_is_empty() -> None:
    cleared = Event(seq=6, cleared=instance_pb2.CacheCleared())
    assert following(EMPTY, watch(stored(5, CHAIN, CHAIN)), watch(cleared)).n_pages == 0


@pytest.mark.parametrize(
    "messages",
    [
        (watch(stored(1, CHAIN)),),  # no snapshot before
        (EMPTY, watch(stored(6, CHAIN))),  # one is missing
        (EMPTY, watch(stored(5, CHAIN)), watch(stored(5, CHAIN))),  # one came twice
        (watch(snapshot=Snapshot(seq=9, last=True)),),  # no first part
        (watch(snapshot=Snapshot(seq=9, first=True)), watch(stored(10, CHAIN))),  # no last part
        (EMPTY, watch(Event(seq=5))),  # of a kind unknown here
    ],
)
def test_missing_events_are_noticed(messages: tuple[instance_pb2.WatchResponse, ...]) -> None:
    with pytest.raises(CacheGap):
        following(*messages)


def test_a_prompt_sent_before_counts_from_the_front_until_it_is_old() -> None:
    routed = RoutedPrompts()
    routed.sent(CHAIN[:4], now=100.0)
    assert routed.usable_pages(CHAIN, now=101.0) == 4
    assert routed.usable_pages(CHAIN[1:2] + CHAIN[5:], now=101.0) == 1
    assert routed.usable_pages(CHAIN, now=100.0 + ROUTED_TTL_S) == 0


def test_memory_of_sent_prompts_is_bounded_and_keeps_the_front_longest() -> None:
    routed = RoutedPrompts(limit=5)
    routed.sent(CHAIN, now=1.0)
    assert routed.usable_pages(CHAIN, now=2.0) == 5


@given(st.lists(st.integers(0, 9), max_size=40), st.sampled_from([4, 16]), st.binary(max_size=4))
def test_hashes_are_those_of_prefill(ids: list[int], page_tokens: int, salt: bytes) -> None:
    pages = PromptPages(ids, salt)
    chain = pages.chain("layout|draft:", page_tokens)
    root = hash_chain.root("layout|draft:", page_tokens, salt=salt)
    assert chain == hash_chain.page_hashes(root, ids, page_tokens)
    assert pages.chain("layout|draft:", page_tokens) is chain
