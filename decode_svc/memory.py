"""Pages and state slots of a decode instance, as admission takes them: for a request's whole worst case at once.

`PoolMemory` is two plain pools; what a dead transfer may still write stays in quarantine there. `CachedMemory` belongs
to an instance that computes every prompt itself: the memory of a prefix cache, where a request shares the pages that
earlier prompts left and nobody writes from outside. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from decode_svc.request import DecodeRequest
from k3.cache.pages import PageCounts, PagePool
from k3.cache.slots import SlotCounts, SlotPool
from prefill_svc.core.prefix_cache import Holding, PrefixCache, Prompt


class Hold(NamedTuple):
    """Memory in quarantine: a write of a dead transfer may still land in it."""

    pages: tuple[int, ...]
    state_slot: int


class Place(NamedTuple):
    """Where a request's caches lie, on every rank alike."""

    pages: tuple[int, ...]
    state_slot: int


class Memory(Protocol):
    """What the scheduler asks of memory.

    has_rings_of_rows: draft rings belong to rows, not to state slots. has_outside_writers: transfers write here, which
    keep to no order of plans.
    """

    has_rings_of_rows: bool
    has_outside_writers: bool

    @property
    def n_pages(self) -> int:
        """Pages in all."""
        ...

    @property
    def n_slots(self) -> int:
        """State slots in all."""
        ...

    def fits(self, request: DecodeRequest, n_pages: int) -> bool:
        """Whether `take` would succeed now."""
        ...

    def take(self, request: DecodeRequest, n_pages: int) -> Place:
        """Reserve. Raises MemoryError where it does not fit."""
        ...

    def release(self, request: DecodeRequest) -> None:
        """Give back what `take` gave."""
        ...

    def quarantine(self, request: DecodeRequest) -> Hold:
        """Take it out of circulation until `settle`."""
        ...

    def settle(self, hold: Hold) -> None:
        """No write can land in it any more."""
        ...

    def page_counts(self) -> PageCounts:
        """Pages by state."""
        ...

    def slot_counts(self) -> SlotCounts:
        """State slots by state."""
        ...


class PoolMemory:
    """See the module's docstring."""

    def __init__(self, pages: PagePool, slots: SlotPool) -> None:
        self.has_rings_of_rows, self.has_outside_writers = False, True
        self._pages, self._slots = pages, slots
        self._places: dict[int, Place] = {}

    @property
    def n_pages(self) -> int:
        """Pages in all."""
        return self._pages.n_pages

    @property
    def n_slots(self) -> int:
        """State slots in all."""
        return self._slots.n_slots

    def fits(self, request: DecodeRequest, n_pages: int) -> bool:
        """Whether `take` would succeed now."""
        return self._pages.available >= n_pages and self._slots.available > 0

    def take(self, request: DecodeRequest, n_pages: int) -> Place:
        """Reserve."""
        place = Place(self._pages.allocate(n_pages), self._slots.allocate().index)
        self._places[request.key] = place
        return place

    def release(self, request: DecodeRequest) -> None:
        """Give back what `take` gave."""
        place = self._places.pop(request.key)
        self._pages.release(place.pages)
        self._slots.release(place.state_slot)

    def quarantine(self, request: DecodeRequest) -> Hold:
        """Take it out of circulation until `settle`."""
        place = self._places.pop(request.key)
        self._pages.quarantine(place.pages)
        self._slots.quarantine(place.state_slot)
        return Hold(*place)

    def settle(self, hold: Hold) -> None:
        """No write can land in it any more."""
        self._pages.settle(hold.pages)
        self._slots.settle(hold.state_slot)

    def page_counts(self) -> PageCounts:
        """Pages by state."""
        return self._pages.counts()

    def slot_counts(self) -> SlotCounts:
        """State slots by state."""
        return self._slots.counts()


class CachedMemory:
    """See the module's docstring. chain: hashes of a request's whole pages."""

    def __init__(
        self,
        cache: PrefixCache,
        chain: Callable[[DecodeRequest], tuple[bytes, ...]],
        *,
        has_rings_of_rows: bool,
    ) -> None:
        self.has_rings_of_rows, self.has_outside_writers = has_rings_of_rows, False
        self._cache, self._chain = cache, chain
        self._holdings: dict[int, Holding] = {}
        self._head: tuple[DecodeRequest, Prompt] | None = None  # of the queue, hashed once

    @property
    def n_pages(self) -> int:
        """Pages in all."""
        return self._cache.n_pages

    @property
    def n_slots(self) -> int:
        """State slots in all."""
        return self._cache.n_slots

    def holding(self, request: DecodeRequest) -> Holding:
        """What the request holds."""
        return self._holdings[request.key]

    def fits(self, request: DecodeRequest, n_pages: int) -> bool:
        """Whether `take` would succeed now."""
        prompt = self._prompt(request, n_pages)
        needed, _n_slots = self._cache.cost(prompt, self._cache.look(prompt))
        return needed <= self._cache.available_pages and self._cache.available_slots > 0

    def take(self, request: DecodeRequest, n_pages: int) -> Place:
        """Reserve; what the cache holds of the prompt is shared."""
        holding = self._cache.reserve(self._prompt(request, n_pages))
        if holding is None:
            raise MemoryError(f"{n_pages} pages and a state slot asked: {self.page_counts()}")
        self._head = None
        self._holdings[request.key] = holding
        return Place(holding.pages, holding.tenant.live)

    def release(self, request: DecodeRequest) -> None:
        """Give back what `take` gave; pages of the prompt stay for reuse."""
        self._cache.release(self._holdings.pop(request.key))

    def quarantine(self, request: DecodeRequest) -> Hold:
        """Nobody writes here from outside."""
        raise AssertionError(f"{request!r}: its memory was never given to a prefill instance")

    def settle(self, hold: Hold) -> None:
        """Nothing was ever in quarantine."""
        raise AssertionError(f"{hold}: nothing is ever in quarantine here")

    def page_counts(self) -> PageCounts:
        """Pages by state."""
        return self._cache.page_counts()

    def slot_counts(self) -> SlotCounts:
        """State slots by state: those that requests write, and all others, checkpoints and pinned ones too."""
        counts = self._cache.slot_counts()
        return SlotCounts(counts.total, counts.total - counts.held, counts.held, 0)

    def _prompt(self, request: DecodeRequest, n_pages: int) -> Prompt:
        if self._head is None or self._head[0] is not request:
            prompt = Prompt(request.prompt_len, self._chain(request), room=n_pages)
            self._head = (request, prompt)
        return self._head[1]
