"""Laws of page and slot pools under any order of calls: nothing owned twice, nothing lost."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from k3.cache.pages import PagePool
from k3.cache.slots import SlotPool


class Pages(RuleBasedStateMachine):
    """A pool of 9 pages beside a plain model: one list of holders per page."""

    def __init__(self):
        super().__init__()
        self.evicted: list[int] = []
        self.pool = PagePool(9, self.evicted.append)
        self.holders: list[tuple[int, ...]] = []
        self.quarantined: list[tuple[int, ...]] = []
        self.cached: set[int] = set()

    @rule(n=st.integers(0, 9))
    def allocate(self, n):
        if n > self.pool.available:
            with pytest.raises(MemoryError):
                self.pool.allocate(n)
            return
        before = len(self.evicted)
        pages = self.pool.allocate(n)
        assert len(set(pages)) == n
        held = {p for pages in self.holders + self.quarantined for p in pages}
        assert not held & set(pages), "a page was handed out twice"
        fresh = set(self.evicted[before:])
        assert fresh == self.cached & set(pages), "eviction of a page must be announced"
        self.cached -= fresh
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data, keep):
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        still = {p for other in self.holders for p in other}
        self.pool.release(pages, keep=(lambda _page: True) if keep else None)
        if keep:
            self.cached |= set(pages) - still

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def retain(self, data):
        pages = data.draw(st.sampled_from(self.holders))
        self.pool.retain(pages)
        self.holders.append(pages)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def retain_cached(self, data):
        page = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.retain([page])
        self.cached.remove(page)
        self.holders.append((page,))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def quarantine(self, data):
        index = data.draw(st.integers(0, len(self.holders) - 1))
        shared = {p for i, other in enumerate(self.holders) if i != index for p in other}
        if shared & set(self.holders[index]):
            return
        pages = self.holders.pop(index)
        self.pool.quarantine(pages)
        self.quarantined.append(pages)

    @precondition(lambda self: self.quarantined)
    @rule()
    def settle(self):
        self.pool.settle(self.quarantined.pop())

    @rule()
    def flush(self):
        assert self.pool.drop_cached() == len(self.cached)
        self.cached.clear()

    @invariant()
    def states_add_up(self):
        counts = self.pool.counts()
        held = {p for pages in self.holders for p in pages}
        assert counts.held == len(held)
        assert counts.cached == len(self.cached)
        assert counts.quarantined == sum(len(p) for p in self.quarantined)
        assert counts.free + counts.held + counts.cached + counts.quarantined == counts.total == 9
        assert self.pool.available == counts.free + counts.cached


TestPages = Pages.TestCase


def test_a_fresh_pool_hands_out_one_ascending_run():
    assert PagePool(8).allocate(5) == (0, 1, 2, 3, 4)


def test_pages_come_back_in_ascending_runs():
    pool = PagePool(8)
    first = pool.allocate(4)
    pool.release(first)
    assert pool.allocate(4) == first


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    evicted: list[int] = []
    pool = PagePool(4, evicted.append)
    pages = pool.allocate(4)
    pool.release(pages, keep=lambda _page: True)
    pool.allocate(2)
    assert evicted == [pages[3], pages[2]]


def test_a_shared_page_cannot_be_quarantined():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.retain(pages)
    with pytest.raises(AssertionError, match="2 holders"):
        pool.quarantine(pages)


def test_slots_never_share_and_epochs_tell_holders_apart():
    pool = SlotPool(2, first=1)
    a, b = pool.allocate(), pool.allocate()
    assert {a.index, b.index} == {1, 2}
    with pytest.raises(MemoryError):
        pool.allocate()
    pool.quarantine(a.index)
    assert pool.available == 0
    pool.settle(a.index)
    again = pool.allocate()
    assert again.index == a.index
    assert again.epoch > a.epoch
    pool.release(b.index)
    assert pool.counts() == (2, 1, 1, 0)
