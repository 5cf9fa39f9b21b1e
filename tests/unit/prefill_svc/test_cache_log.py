"""Numbers, gaps and snapshots of the cache events of one life."""

from __future__ import annotations

import pytest

from prefill_svc import cache_log
from prefill_svc.cache_log import CacheLog
from prefill_svc.core.cache_events import Cleared, Removed, Stored

pytestmark = pytest.mark.prefill


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


class Cache:
    """What there is to snapshot."""

    def __init__(self, n_pages: int = 0, n_checkpoints: int = 0) -> None:
        self.pages = [key(i) for i in range(n_pages)]
        self.checkpoints = [key(i) for i in range(n_checkpoints)]

    def __call__(self) -> tuple[list[bytes], list[bytes]]:
        return self.pages, self.checkpoints


def test_events_are_numbered_without_gaps_and_say_what_came_and_went() -> None:
    log = CacheLog("p-1", Cache())
    for event in (
        Stored(pages=(key(1), key(2))),
        Stored(checkpoints=(key(2),)),
        Removed((key(1),), (key(2),)),
        Cleared(),
    ):
        log.hear(event)
    events = log.since(0)
    assert events is not None
    assert [event.seq for event in events] == [1, 2, 3, 4]
    assert list(events[0].stored.hashes) == [key(1), key(2)]
    assert list(events[1].stored.checkpoints) == [key(2)]
    assert (list(events[2].removed.hashes), list(events[2].removed.checkpoints)) == (
        [key(1)],
        [key(2)],
    )
    assert events[3].WhichOneof("event") == "cleared"
    assert log.since(3) == events[3:]
    assert log.since(4) == []


def test_who_missed_more_than_is_kept_gets_a_snapshot() -> None:
    log = CacheLog("p-1", Cache())
    for i in range(cache_log.MAX_EVENTS + 1):
        log.hear(Stored(pages=(key(i),)))
    assert log.since(0) is None
    assert log.since(1) is not None


def test_events_too_large_for_a_message_are_replaced_by_a_snapshot() -> None:
    log = CacheLog("p-1", Cache())
    half = tuple(key(i) for i in range(cache_log.MAX_HASHES // 2 + 1))
    log.hear(Stored(pages=half))
    assert log.since(0) is not None
    log.hear(Removed(pages=half))
    assert log.since(0) is None
    assert log.since(1) is not None


def test_no_more_hashes_are_kept_than_a_message_holds() -> None:
    log = CacheLog("p-1", Cache())
    many = tuple(key(i) for i in range(cache_log.MAX_HASHES // 3))
    for _ in range(5):
        log.hear(Stored(pages=many))
        assert log.n_hashes <= cache_log.MAX_HASHES
    assert log.since(1) is None
    assert len(log.since(2) or ()) == 3
    log.hear(Removed(pages=(*many, *many, *many, *many)))
    assert log.n_hashes == 0
    assert log.since(5) is None
    assert log.since(6) == []


def test_a_snapshot_comes_in_parts_with_one_first_and_one_last() -> None:
    cache = Cache(n_pages=cache_log.MAX_HASHES + 1, n_checkpoints=3)
    log = CacheLog("p-1", cache)
    log.hear(Cleared())
    parts = log.snapshot()
    assert [(p.first, p.last, p.seq) for p in parts] == [
        (True, False, 1),
        (False, False, 1),
        (False, True, 1),
    ]
    assert [h for p in parts for h in p.pages] == cache.pages
    assert [h for p in parts for h in p.checkpoints] == cache.checkpoints


def test_the_snapshot_of_an_empty_cache_is_one_part() -> None:
    (part,) = CacheLog("p-1", Cache()).snapshot()
    assert part.first
    assert part.last
    assert not part.pages
