"""Events of the prefix cache of one life, numbered and in wire form, for whoever watches this instance.

The newest events are kept, as many as fit into one message. Who has missed more gets a snapshot, in parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import assert_never

from k3.v1 import instance_pb2
from prefill_svc.core.cache_events import CacheEvent, Cleared, Removed, Stored

MAX_EVENTS = 8192
MAX_HASHES = 1 << 15  # of one message: about 600 kB

Held = Callable[[], tuple[Collection[bytes], Collection[bytes]]]


class CacheLog:
    """Implements `k3.rpc.cache_feed.CacheFeed`. `hear` takes what the cache says; it grows by nothing else."""

    def __init__(self, instance_id: str, held: Held) -> None:
        """held: hashes of pages and of checkpoints now, for snapshots."""
        self.instance_id = instance_id
        self.seq = 0
        self._held = held
        self.n_hashes = (
            0  # of the events kept: each is of use to somebody, or it would only fill memory
        )
        self._events: deque[instance_pb2.CacheEvent] = deque()

    def hear(self, event: CacheEvent) -> None:
        """Number an event and keep it."""
        self.seq += 1
        message = instance_pb2.CacheEvent(seq=self.seq)
        match event:
            case Stored(pages, checkpoints):
                message.stored.hashes.extend(pages)
                message.stored.checkpoints.extend(checkpoints)
            case Removed(pages, checkpoints):
                message.removed.hashes.extend(pages)
                message.removed.checkpoints.extend(checkpoints)
            case Cleared():
                message.cleared.SetInParent()
            case _ as never:
                assert_never(never)
        self._events.append(message)
        self.n_hashes += _n_hashes(message)
        while len(self._events) > MAX_EVENTS or self.n_hashes > MAX_HASHES:
            self.n_hashes -= _n_hashes(self._events.popleft())

    def since(self, seq: int) -> list[instance_pb2.CacheEvent] | None:
        """Events after number `seq`; None when not all of them are kept."""
        n = self.seq - seq
        if n > len(self._events):
            return None
        return list(islice(self._events, len(self._events) - n, None))

    def snapshot(self) -> list[instance_pb2.CacheSnapshot]:
        """All there is now, as the parts of one snapshot."""
        pages, checkpoints = (tuple(hashes) for hashes in self._held())
        parts = [instance_pb2.CacheSnapshot(pages=part) for part in _parts(pages)]
        parts += [instance_pb2.CacheSnapshot(checkpoints=part) for part in _parts(checkpoints)]
        parts = parts or [instance_pb2.CacheSnapshot()]
        for part in parts:
            part.seq = self.seq
        parts[0].first, parts[-1].last = True, True
        return parts


def _n_hashes(event: instance_pb2.CacheEvent) -> int:
    return sum(len(e.hashes) + len(e.checkpoints) for e in (event.stored, event.removed))


def _parts(hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [hashes[i : i + MAX_HASHES] for i in range(0, len(hashes), MAX_HASHES)]
