"""What a watcher is told: a snapshot first, every event once, a snapshot again where events are missing."""

from __future__ import annotations

import pytest

from k3.rpc.cache_feed import CacheTail
from k3.v1 import instance_pb2

pytestmark = pytest.mark.prefill


class Feed:
    """Keeps the newest events only."""

    def __init__(self, instance_id: str, keeps: int = 3) -> None:
        self.instance_id, self.keeps = instance_id, keeps
        self.seq = 0

    def since(self, seq: int) -> list[instance_pb2.CacheEvent] | None:
        n = self.seq - seq
        return (
            None
            if n > self.keeps
            else [instance_pb2.CacheEvent(seq=i) for i in range(seq + 1, self.seq + 1)]
        )

    def snapshot(self) -> list[instance_pb2.CacheSnapshot]:
        return [
            instance_pb2.CacheSnapshot(seq=self.seq, first=True),
            instance_pb2.CacheSnapshot(seq=self.seq, last=True),
        ]


def load(instance_id: str) -> instance_pb2.WatchResponse:
    return instance_pb2.WatchResponse(instance_id=instance_id, load=instance_pb2.Load(running=3))


def told(messages: list[instance_pb2.WatchResponse]) -> list[str | list[int]]:
    assert all(m.load.running == 3 for m in messages), "every message carries the load"
    return [
        f"snapshot {m.cache_snapshot.seq}"
        if m.HasField("cache_snapshot")
        else [event.seq for event in m.cache_events]
        for m in messages
    ]


def test_a_snapshot_comes_first_then_every_event_once() -> None:
    feed = Feed("p-1")
    feed.seq = 7
    tail = CacheTail(lambda: feed)
    assert told(tail.messages(load("p-1"))) == ["snapshot 7", "snapshot 7"]
    assert told(tail.messages(load("p-1"))) == [[]]
    feed.seq = 9
    assert told(tail.messages(load("p-1"))) == [[8, 9]]


def test_a_watcher_that_lags_gets_a_snapshot_again() -> None:
    feed = Feed("p-1")
    tail = CacheTail(lambda: feed)
    tail.messages(load("p-1"))
    feed.seq = 5
    assert told(tail.messages(load("p-1"))) == ["snapshot 5", "snapshot 5"]


def test_a_new_life_begins_with_a_snapshot() -> None:
    feeds = [Feed("p-1"), Feed("p-2")]
    tail = CacheTail(lambda: feeds[0])
    tail.messages(load("p-1"))
    del feeds[0]
    assert told(tail.messages(load("p-1"))) == [[]], "the load is of the life before"
    assert told(tail.messages(load("p-2"))) == ["snapshot 0", "snapshot 0"]


def test_an_engine_without_a_cache_sends_its_load_only() -> None:
    assert told(CacheTail(lambda: None).messages(load("d-1"))) == [[]]


def test_the_shared_load_snapshot_is_not_changed() -> None:
    feed = Feed("p-1")
    shared = load("p-1")
    first, second = CacheTail(lambda: feed), CacheTail(lambda: feed)
    assert told(first.messages(shared)) == told(second.messages(shared)) == ["snapshot 0"] * 2
    assert not shared.HasField("cache_snapshot")
