"""State slots of one prefill instance: live ones, checkpoints filed under page hashes, and who may still read them.

Every slot is vacant, live (one request writes it), pinned (a plan in flight reads or fills it), or a checkpoint nobody
reads, spent in order of last use when no slot is vacant. A filed slot is never written again: whoever goes on from it
*forks*, reads it once and writes to a slot of its own. How a state that a running request has reached becomes a
checkpoint is the mode:

    fork_at_schedule  planning the chunk: the slot it writes becomes the checkpoint, the next chunk reads it and writes
                      a fresh one. Ranks execute plans in order, so nothing has to wait.
    fork_hold         at the acknowledgement, in the same way; until then no further chunk may be planned (the hold).
    copy              the ranks copy the state into a checkpoint slot after the chunk; the live slot stays.

A checkpoint is visible once the plan that fills it is acknowledged. What a plan's rows pinned is let go at its
acknowledgement, whatever happened to their requests. Pure: no clock, no tensors.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

NO_SLOT = -1


class FilingError(Exception):
    """A checkpoint could not be filed: costs the checkpoint, never the request."""


class Mode(Enum):
    """How checkpoints are filed; see the module's docstring."""

    FORK_AT_SCHEDULE = "fork_at_schedule"
    FORK_HOLD = "fork_hold"
    COPY = "copy"


class StateCounts(NamedTuple):
    """State slots; free + held + pinned + checkpoints = total. held: live ones."""

    total: int
    free: int
    held: int
    pinned: int
    checkpoints: int


@dataclass(slots=True)
class CheckpointCounters:
    """Since the start. dropped: no slot or no page to file under; evicted: spent; orphaned: its page went away."""

    kept: int = 0
    dropped: int = 0
    evicted: int = 0
    orphaned: int = 0


@dataclass(eq=False, slots=True)
class Tenant:
    """One incarnation of a request as a holder of slots. Only `StateSlots` writes to it.

    live: the slot its chunks write. source: the slot its next chunk reads instead, pinned. hold_end: no chunk may be
    planned before the one that ends there is acknowledged; 0 = none.
    """

    live: int
    source: int = NO_SLOT
    hold_end: int = 0
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class StateRow:
    """What one planned chunk does to state slots, frozen.

    reads: a slot pinned for this row's read. key: the state after the chunk is filed under it, None = not at all.
    pending: the slot being filled for it, pinned; none in `fork_hold`. copy_slot: where ranks copy the state to.
    """

    tenant: Tenant
    end: int
    read_slot: int
    write_slot: int
    reads: int = NO_SLOT
    key: bytes | None = None
    pending: int = NO_SLOT
    copy_slot: int = NO_SLOT


@dataclass(slots=True)
class StateSlots:
    """Slots first .. first + n_slots - 1; has_holds: several plans may be in flight, so `fork_hold` needs its hold."""

    n_slots: int
    mode: Mode = Mode.FORK_AT_SCHEDULE
    has_holds: bool = True
    first: int = 0
    counters: CheckpointCounters = field(default_factory=CheckpointCounters)
    _vacant: list[int] = field(init=False)
    _live: set[int] = field(default_factory=set[int])
    _pins: dict[int, int] = field(default_factory=dict[int, int])
    _index: dict[bytes, int] = field(default_factory=dict[bytes, int])
    _keys: dict[int, bytes] = field(default_factory=dict[int, bytes])
    _unread: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])
    _evicted: list[bytes] = field(default_factory=list[bytes])

    def __post_init__(self) -> None:
        if self.n_slots < 1:
            raise ValueError(f"n_slots={self.n_slots}: must be at least 1")
        self._vacant = list(range(self.first, self.first + self.n_slots))

    # ------------------------------------------------------------ what is there

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    @property
    def available(self) -> int:
        """Slots a new request could get: vacant ones, and checkpoints nobody reads."""
        return len(self._vacant) + len(self._unread)

    def is_unread(self, key: bytes) -> bool:
        """Whether the checkpoint is one of the available slots."""
        return self._index[key] in self._unread

    def checkpoints(self) -> dict[bytes, int]:
        """Slot by page hash."""
        return dict(self._index)

    def by_last_use(self) -> list[int]:
        """Checkpoints nobody reads, the next one to be spent first."""
        return list(self._unread)

    def vacant(self) -> list[int]:
        """Slots without a use, in the order they are handed out."""
        return sorted(self._vacant)

    def pins(self) -> dict[int, int]:
        """Pins by slot."""
        return dict(self._pins)

    def counts(self) -> StateCounts:
        """Slots by state."""
        return StateCounts(
            self.n_slots, len(self._vacant), len(self._live), len(self._pins), len(self._unread)
        )

    def take_evicted(self) -> list[bytes]:
        """Keys of checkpoints spent or adopted since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    # ------------------------------------------------------------ requests

    def admit(self, key: bytes | None) -> Tenant | None:
        """A live slot for a request, which continues from the checkpoint `key` (None: from zero); None without one.

        When nothing else is left, the checkpoint itself is adopted: it stops being one and is continued in place.
        """
        if key is None:
            live = self._take()
            return None if live is None else self._tenant(live)
        source = self._index[key]
        if self.available - (source in self._unread) > 0:
            self._pin(source)
            live = self._take()
            assert live is not None
            return self._tenant(live, source)
        if source not in self._unread:
            return None
        self._forget(source)
        self._evicted.append(key)
        del self._unread[source]
        return self._tenant(source)

    def resume(self, tenant: Tenant, key: bytes) -> None:
        """Continue a request of which nothing is planned yet from the checkpoint `key`, whatever it had before."""
        source = self._index[key]
        self._pin(source)
        if tenant.source != NO_SLOT:
            self._unpin(tenant.source)
        tenant.source = source

    def close(self, tenant: Tenant) -> None:
        """Its request is planned no further: hold and pending read are dropped, its rows in flight file nothing.

        The live slot stays its own until `release`. Idempotent.
        """
        tenant.is_open, tenant.hold_end = False, 0
        if tenant.source != NO_SLOT:
            self._unpin(tenant.source)
            tenant.source = NO_SLOT

    def release(self, tenant: Tenant) -> None:
        """Give the live slot back. Plans in flight may still write it: later plans that reuse it run later."""
        self.close(tenant)
        self._live.remove(tenant.live)
        heapq.heappush(self._vacant, tenant.live)

    # ------------------------------------------------------------ plan and acknowledgement

    def row(self, tenant: Tenant, start: int, end: int, key: bytes | None) -> StateRow:
        """Freeze the next chunk of a request. key: file the state at its end under this hash."""
        assert tenant.is_open, "a request that left is not planned"
        assert not tenant.hold_end, "a held request is not planned"
        reads, tenant.source = tenant.source, NO_SLOT
        read_slot = reads if reads != NO_SLOT else tenant.live if start else NO_SLOT
        row = StateRow(tenant, end, read_slot, tenant.live, reads)
        if key is None:
            return row
        match self.mode:
            case Mode.FORK_HOLD:
                tenant.hold_end = end if self.has_holds else 0
                return StateRow(tenant, end, read_slot, row.write_slot, reads, key)
            case Mode.FORK_AT_SCHEDULE:
                fresh = self._fresh()
                if fresh == NO_SLOT:
                    return row
                self._fork(tenant, fresh)
                self._pin(row.write_slot)
                return StateRow(tenant, end, read_slot, row.write_slot, reads, key, row.write_slot)
            case Mode.COPY:
                target = self._fresh()
                if target == NO_SLOT:
                    return row
                self._pin(target)
                return StateRow(tenant, end, read_slot, row.write_slot, reads, key, target, target)

    def lift_holds(self, rows: Sequence[StateRow]) -> None:
        """First step of an acknowledgement: holds that end with these rows, all of them before anything is filed."""
        for row in rows:
            if row.tenant.hold_end and row.tenant.hold_end <= row.end:
                row.tenant.hold_end = 0

    def file(self, row: StateRow) -> None:
        """Make the state at the row's end visible under its hash. Raises FilingError."""
        tenant, slot = row.tenant, row.pending
        if row.key is None or not tenant.is_open:
            return
        if self.mode is Mode.FORK_HOLD:
            if tenant.live != row.write_slot:
                raise FilingError(f"slot {row.write_slot} was left before its state was filed")
            fresh = self._fresh()
            if fresh == NO_SLOT:
                return
            slot = row.write_slot
            self._fork(tenant, fresh)
        before = self._index.get(row.key)
        if before is not None:
            self._forget(before)
            if before in self._unread:
                del self._unread[before]
                heapq.heappush(self._vacant, before)
        self._index[row.key], self._keys[slot] = slot, row.key
        self.counters.kept += 1

    def unpin(self, rows: Sequence[StateRow]) -> None:
        """Last step of an acknowledgement: what the rows read, and what they filled, filed or not."""
        for row in rows:
            for slot in (row.pending, row.reads):
                if slot != NO_SLOT:
                    self._unpin(slot)

    # ------------------------------------------------------------ eviction

    def drop(self, key: bytes) -> bool:
        """The page of this hash is gone, so its checkpoint can never be reached again; whether there was one."""
        slot = self._index.get(key)
        if slot is None:
            return False
        self._forget(slot)
        self.counters.orphaned += 1
        if slot in self._unread:
            del self._unread[slot]
            heapq.heappush(self._vacant, slot)
        return True

    def clear(self) -> int:
        """Forget every checkpoint; pinned slots keep their pins. Returns how many there were."""
        n = len(self._index)
        for slot in list(self._keys):
            self._forget(slot)
        while self._unread:
            heapq.heappush(self._vacant, self._unread.popitem()[0])
        return n

    # ------------------------------------------------------------ slots

    def _tenant(self, live: int, source: int = NO_SLOT) -> Tenant:
        self._live.add(live)
        return Tenant(live, source)

    def _take(self) -> int | None:
        """The lowest vacant slot, else the checkpoint that was not used for longest; None when there is neither."""
        if self._vacant:
            return heapq.heappop(self._vacant)
        if not self._unread:
            return None
        slot, _none = self._unread.popitem(last=False)
        self._evicted.append(self._keys[slot])
        self._forget(slot)
        self.counters.evicted += 1
        return slot

    def _fresh(self) -> int:
        """A slot for a checkpoint; NO_SLOT, counted, when there is none: a chunk never waits for one."""
        slot = self._take()
        if slot is None:
            self.counters.dropped += 1
            return NO_SLOT
        return slot

    def _fork(self, tenant: Tenant, fresh: int) -> None:
        """The next chunk reads what was live, and writes `fresh`."""
        old = tenant.live
        self._live.remove(old)
        self._live.add(fresh)
        self._pin(old)
        tenant.live, tenant.source = fresh, old

    def _forget(self, slot: int) -> None:
        del self._index[self._keys.pop(slot)]

    def _pin(self, slot: int) -> None:
        self._unread.pop(slot, None)
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def _unpin(self, slot: int) -> None:
        left = self._pins[slot] - 1
        if left:
            self._pins[slot] = left
            return
        del self._pins[slot]
        if slot in self._keys:
            self._unread[slot] = None
        else:
            heapq.heappush(self._vacant, slot)
