"""Follows the cache events of an instance's `Watch` stream into a `CacheView`.

A snapshot in parts comes first; events follow it, numbered without a gap. After a gap the stream is opened anew, which
begins with a snapshot.
"""

from __future__ import annotations

from k3.v1 import instance_pb2
from router.fleet.prefix import CacheView


class CacheGap(Exception):
    """Events are missing: what the view holds is not what the instance holds."""


class CacheFollower:
    """One stream's reader; a new stream needs a new one."""

    def __init__(self) -> None:
        self._seq: int | None = None  # of the newest event applied; None before a whole snapshot
        self._is_in_snapshot = False

    def apply(self, message: instance_pb2.WatchResponse, view: CacheView) -> None:
        """Take what a message says into the view. Raises CacheGap."""
        if message.HasField("cache_snapshot"):
            self._snapshot(message.cache_snapshot, view)
        for event in message.cache_events:
            if self._seq is None or event.seq != self._seq + 1:
                raise CacheGap(f"cache event {event.seq} after {self._seq}")
            self._seq = event.seq
            self._event(event, view)

    def _snapshot(self, part: instance_pb2.CacheSnapshot, view: CacheView) -> None:
        view.is_there = True
        if part.first:
            view.lose()
        elif not self._is_in_snapshot:
            raise CacheGap("a snapshot of the cache without its first part")
        view.stored(part.pages, part.checkpoints)
        self._is_in_snapshot = not part.last
        view.is_whole = part.last
        self._seq = part.seq if part.last else None

    @staticmethod
    def _event(event: instance_pb2.CacheEvent, view: CacheView) -> None:
        match event.WhichOneof("event"):
            case "stored":
                view.stored(event.stored.hashes, event.stored.checkpoints)
            case "removed":
                view.removed(event.removed.hashes, event.removed.checkpoints)
            case "cleared":
                view.clear()
            case _:  # of a newer version: whatever it says, nothing can be relied on any more
                raise CacheGap(f"cache event {event.seq} of a kind unknown here")
