"""Slot ids of one instance (state slots, draft slots, rows): who holds them, which are not yet quiet.

A slot belongs to one holder at a time. Its epoch grows whenever it is handed out, so that whatever still carries an
older epoch is recognised as foreign. Pure: no tensors, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class SlotCounts(NamedTuple):
    """Slots by state; they add up to `total`."""

    total: int
    free: int
    held: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot and the epoch of this holder."""

    index: int
    epoch: int


class SlotPool:
    """Slot ids `first..first + n_slots - 1`; ids below `first` are dummies that are never handed out."""

    def __init__(self, n_slots: int, *, first: int = 0) -> None:
        if n_slots < 1:
            raise ValueError(f"n_slots={n_slots}: must be at least 1")
        self.n_slots = n_slots
        self.first = first
        self._free = list(range(first + n_slots - 1, first - 1, -1))
        self._held: set[int] = set()
        self._quarantined: set[int] = set()
        self._epochs: dict[int, int] = {}

    @property
    def available(self) -> int:
        """Slots that `allocate` can hand out."""
        return len(self._free)

    def counts(self) -> SlotCounts:
        """Slots by state."""
        return SlotCounts(self.n_slots, len(self._free), len(self._held), len(self._quarantined))

    def allocate(self) -> Slot:
        """Take a slot. Raises MemoryError when none is free: callers check `available` first."""
        if not self._free:
            raise MemoryError(f"no slot free of {self.n_slots}")
        index = self._free.pop()
        self._held.add(index)
        self._epochs[index] = self._epochs.get(index, 0) + 1
        return Slot(index, self._epochs[index])

    def release(self, index: int) -> None:
        """Give a held slot back."""
        self._held.remove(index)
        self._free.append(index)

    def quarantine(self, index: int) -> None:
        """Take a held slot out of circulation until `settle`."""
        self._held.remove(index)
        self._quarantined.add(index)

    def settle(self, index: int) -> None:
        """Return a quarantined slot: no write can land in it any more."""
        self._quarantined.remove(index)
        self._free.append(index)
