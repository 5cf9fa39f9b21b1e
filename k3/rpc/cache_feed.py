"""What one watcher is told of a prefix cache: a snapshot first, then every event, then a snapshot again if it lags.

Load snapshots replace each other; cache events must not. So every `Watch` call has a `CacheTail` that remembers what it
has passed on, while the engine's `CacheFeed` keeps the newest events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from k3.v1 import instance_pb2


class CacheFeed(Protocol):
    """Events of one life of an engine."""

    instance_id: str
    seq: int
    """Number of the newest event; 0 before the first."""

    def since(self, seq: int) -> list[instance_pb2.CacheEvent] | None:
        """Events after number `seq`; None when a snapshot must take their place."""
        ...

    def snapshot(self) -> list[instance_pb2.CacheSnapshot]:
        """All there is now, in parts, at least one."""
        ...


class CacheTail:
    """One watcher's place in the feed. current: the engine's feed, None without a prefix cache."""

    def __init__(self, current: Callable[[], CacheFeed | None]) -> None:
        self._current = current
        self._feed: CacheFeed | None = None
        self._seq = 0

    def messages(self, load: instance_pb2.WatchResponse) -> list[instance_pb2.WatchResponse]:
        """The messages that pass on a load snapshot and everything since the last one."""
        feed = self._current()
        if feed is None or feed.instance_id != load.instance_id:
            return [load]
        events = feed.since(self._seq) if feed is self._feed else None
        self._feed, self._seq = feed, feed.seq
        if events is not None:
            return [_with(load, cache_events=events)]
        return [_with(load, cache_snapshot=part) for part in feed.snapshot()]


def _with(
    load: instance_pb2.WatchResponse,
    *,
    cache_events: list[instance_pb2.CacheEvent] | None = None,
    cache_snapshot: instance_pb2.CacheSnapshot | None = None,
) -> instance_pb2.WatchResponse:
    """A copy: the load snapshot is shared by all watchers."""
    return instance_pb2.WatchResponse(
        instance_id=load.instance_id,
        load=load.load,
        cache_events=cache_events,
        cache_snapshot=cache_snapshot,
    )
