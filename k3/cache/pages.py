"""Page ids of one instance: who holds them, which are kept for reuse, which are not yet quiet.

Every page is in exactly one state:

    free ── allocate ──> held (refcount >= 1) ── release ──> free, or cached (kept for reuse, least recently used)
                          │
                          └── quarantine ──> quarantined ── settle ──> free

Counts are the leak check: with no request in flight `held == quarantined == 0`. Pure: no tensors, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class PageCounts(NamedTuple):
    """Pages by state."""

    total: int
    free: int
    held: int
    cached: int
    quarantined: int


class PagePool:
    """Refcounted page ids 0..n_pages-1. `on_evict(page)` is called when a cached page is taken for something else."""

    def __init__(self, n_pages: int, on_evict: Callable[[int], None] | None = None) -> None:
        if n_pages < 1:
            raise ValueError(f"n_pages={n_pages}: must be at least 1")
        self.n_pages = n_pages
        self._on_evict = on_evict
        self._free: list[int] = list(range(n_pages - 1, -1, -1))
        self._refs: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantined: set[int] = set()

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out: free ones and cached ones nobody holds."""
        return len(self._free) + len(self._cached)

    def counts(self) -> PageCounts:
        """Pages by state; the states add up to `total`."""
        return PageCounts(
            self.n_pages,
            len(self._free),
            len(self._refs),
            len(self._cached),
            len(self._quarantined),
        )

    def n_held(self, pages: Iterable[int]) -> int:
        """How many of these somebody holds: retaining them takes nothing from what is available."""
        return sum(page in self._refs for page in pages)

    def allocate(self, n: int) -> tuple[int, ...]:
        """Take `n` pages with refcount 1, ascending where possible (dense runs transfer as one descriptor).

        Raises MemoryError when fewer are available: callers check `available` first.
        """
        if n > self.available:
            raise MemoryError(f"{n} pages asked, {self.available} available of {self.n_pages}")
        taken: list[int] = []
        for _ in range(n):
            if self._free:
                taken.append(self._free.pop())
                continue
            page, _none = self._cached.popitem(last=False)
            if self._on_evict is not None:
                self._on_evict(page)
            taken.append(page)
        for page in taken:
            self._refs[page] = 1
        return tuple(taken)

    def retain(self, pages: Iterable[int]) -> None:
        """One more holder for each page; a cached page becomes held again."""
        for page in pages:
            if page in self._cached:
                del self._cached[page]
                self._refs[page] = 1
            else:
                self._refs[page] += 1

    def release(self, pages: Sequence[int], *, keep: Callable[[int], bool] | None = None) -> None:
        """One holder less for each page. The last release frees it, or caches it when `keep(page)` says so.

        Pages are freed last to first, so that the next allocation gets them in ascending order, and the tail of a
        prefix is evicted before its head.
        """
        for page in reversed(pages):
            left = self._refs[page] - 1
            if left > 0:
                self._refs[page] = left
                continue
            del self._refs[page]
            if keep is not None and keep(page):
                self._cached[page] = None
            else:
                self._free.append(page)

    def quarantine(self, pages: Sequence[int]) -> None:
        """Take pages out of circulation until `settle`; each must be held exactly once."""
        for page in pages:
            if self._refs.get(page) != 1:
                raise AssertionError(f"page {page} has {self._refs.get(page, 0)} holders, not 1")
            del self._refs[page]
            self._quarantined.add(page)

    def settle(self, pages: Sequence[int]) -> None:
        """Return quarantined pages to the free list: no write can land in them any more."""
        for page in reversed(pages):
            self._quarantined.remove(page)
            self._free.append(page)

    def drop_cached(self) -> int:
        """Free every cached page (cache flush); returns how many."""
        n = len(self._cached)
        while self._cached:
            page, _none = self._cached.popitem(last=True)
            if self._on_evict is not None:
                self._on_evict(page)
            self._free.append(page)
        return n
