"""The memory of a prefill instance: pages and state slots of running prompts, and what earlier prompts left for reuse.

A page is found again by its hash (`k3/cache/hash_chain.py`), and only behind all pages before it. A prompt can skip the
tokens of found pages up to the deepest *checkpoint* among them: attention without the recurrent state of the same
prefix is no hit. A page becomes visible when the plan that completed it is acknowledged, and stays until it is
allocated anew; with it goes the checkpoint behind it, which nothing could reach any more. Drafter rows lie in the same
pages. With the ladder off and no hashes this is a plain pool. Pure: no clock, no sockets, no tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from k3.cache.pages import PageCounts, PagePool
from prefill_svc.core.cache_events import Cleared, OnEvent, Removed, Stored, unheard
from prefill_svc.core.checkpoints import (
    FilingError,
    Mode,
    StateCounts,
    StateRow,
    StateSlots,
    Tenant,
)
from prefill_svc.core.ladder import Ladder, Reason

log = logging.getLogger("k3.prefill")


class Gate(NamedTuple):
    """What a prompt finds, in pages. chain: cached in one piece from the front; wanted: usable if every page had a
    checkpoint; hit: usable. demand: position where a checkpoint is missing, 0 = nowhere."""

    chain: int
    wanted: int
    hit: int
    demand: int


def gate(
    prompt_len: int, n_matched: int, has_checkpoint: Callable[[int], bool], ladder: Ladder
) -> Gate:
    """The rule of hits. n_matched: matching pages from the front; has_checkpoint(n): one stands behind n pages.

    At least one token is always computed, and `successor_room` tokens follow a checkpoint.
    """
    page_tokens = ladder.page_tokens
    chain = min(n_matched, (prompt_len - 1) // page_tokens)
    wanted = max(0, min(chain, ladder.last_target(prompt_len) // page_tokens))
    hit = next((n for n in range(wanted, 0, -1) if has_checkpoint(n)), 0)
    return Gate(chain, wanted, hit, wanted * page_tokens if wanted > hit and ladder.step else 0)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the cache must know of a prompt. chain: hash of every whole page, () = not cached.

    takes_hits: false for prompts of which every token must be computed. room: pages it takes at least, more than its
    own where tokens are to follow it in place.
    """

    length: int
    chain: tuple[bytes, ...] = ()
    takes_hits: bool = True
    room: int = 0


@dataclass(eq=False, slots=True)
class Holding:
    """What one running prompt holds. pages: all of it, in order; the first ones may be shared. start: tokens found.

    Frozen once its first chunk is planned; until then `PrefixCache.begin` may find more.
    """

    prompt: Prompt
    pages: tuple[int, ...]
    tenant: Tenant
    start: int
    demand: int


@dataclass(frozen=True, slots=True)
class Row:
    """One planned chunk, frozen: tokens start .. end - 1."""

    holding: Holding
    start: int
    end: int
    state: StateRow


@dataclass(slots=True)
class CacheCounters:
    """Since the start. Tokens are counted per started prompt: wanted - hit is reuse lost to missing checkpoints."""

    query_tokens: int = 0
    chain_tokens: int = 0
    wanted_tokens: int = 0
    hit_tokens: int = 0
    demands_recorded: int = 0
    demands_cut: int = 0
    filing_errors: int = 0


@dataclass(slots=True)
class PrefixCache:
    """See the module's docstring. has_holds: several plans may be in flight."""

    n_pages: int
    n_slots: int
    ladder: Ladder
    mode: Mode = Mode.FORK_AT_SCHEDULE
    has_holds: bool = True
    on_event: OnEvent = unheard
    first_slot: int = 0
    counters: CacheCounters = field(default_factory=CacheCounters)
    slots: StateSlots = field(init=False)
    _pages: PagePool = field(init=False)
    _index: dict[bytes, int] = field(default_factory=dict[bytes, int])
    _hashes: dict[int, bytes] = field(default_factory=dict[int, bytes])
    _gone: list[bytes] = field(default_factory=list[bytes])
    _orphans: list[bytes] = field(default_factory=list[bytes])

    def __post_init__(self) -> None:
        self.slots = StateSlots(self.n_slots, self.mode, self.has_holds, self.first_slot)
        self._pages = PagePool(self.n_pages, self._evicted)

    # ------------------------------------------------------------ what is there

    @property
    def available_pages(self) -> int:
        """Pages a new prompt could get."""
        return self._pages.available

    @property
    def available_slots(self) -> int:
        """State slots a new prompt could get."""
        return self.slots.available

    def totals(self) -> dict[str, int]:
        """All counters by name."""
        return {**asdict(self.counters), **asdict(self.slots.counters)}

    def page_counts(self) -> PageCounts:
        """Pages by state."""
        return self._pages.counts()

    def slot_counts(self) -> StateCounts:
        """State slots by state."""
        return self.slots.counts()

    def pages(self) -> dict[bytes, int]:
        """Cached pages by hash."""
        return dict(self._index)

    def checkpoints(self) -> dict[bytes, int]:
        """State slots of checkpoints by the hash of their page."""
        return self.slots.checkpoints()

    def pages_for(self, n_tokens: int) -> int:
        """Pages that many tokens occupy."""
        return -(-n_tokens // self.ladder.page_tokens)

    # ------------------------------------------------------------ requests

    def look(self, prompt: Prompt) -> Gate:
        """What the prompt would find now."""
        if not prompt.takes_hits:
            return Gate(0, 0, 0, 0)
        chain, n_matched = prompt.chain, 0
        while n_matched < len(chain) and chain[n_matched] in self._index:
            n_matched += 1
        return gate(prompt.length, n_matched, lambda n: chain[n - 1] in self.slots, self.ladder)

    def cost(self, prompt: Prompt, found: Gate) -> tuple[int, int]:
        """Pages and state slots that its start takes from what is available; pages in use by others are free of cost.

        The checkpoint it reads counts as taken while it does; if it is the last slot, it is adopted instead.
        """
        shared = self._pages.n_held(self._index[h] for h in prompt.chain[: found.hit])
        n_slots = 1 + (found.hit > 0 and self.slots.is_unread(prompt.chain[found.hit - 1]))
        return self._room(prompt) - shared, n_slots

    def start(self, prompt: Prompt) -> Holding | None:
        """Take pages and a state slot for the whole prompt; None, and nothing taken, when they do not suffice."""
        found = self.look(prompt)
        holding = self._take(prompt, found)
        if holding is not None:
            self._count(prompt, found)
        return holding

    def reserve(self, prompt: Prompt) -> Holding | None:
        """As `start`, for a prompt that waits with its memory in hand until `begin`."""
        return self._take(prompt, self.look(prompt))

    def _take(self, prompt: Prompt, found: Gate) -> Holding | None:
        n_pages, _ = self.cost(prompt, found)
        if n_pages > self._pages.available:
            return None
        tenant = self.slots.admit(prompt.chain[found.hit - 1] if found.hit else None)
        if tenant is None:
            return None
        shared = tuple(self._index[h] for h in prompt.chain[: found.hit])
        self._pages.retain(shared)
        own = self._pages.allocate(self._room(prompt) - found.hit)
        self._tell_removed()
        start = found.hit * self.ladder.page_tokens
        return Holding(prompt, shared + own, tenant, start, found.demand)

    def begin(self, holding: Holding) -> None:
        """The first chunk is about to be planned: take what came to be cached since the reservation, and count."""
        prompt, page_tokens = holding.prompt, self.ladder.page_tokens
        before, found = holding.start // page_tokens, self.look(holding.prompt)
        if found.hit <= before:
            found = Gate(max(before, found.chain), max(before, found.wanted), before, found.demand)
        else:
            self.slots.resume(holding.tenant, prompt.chain[found.hit - 1])
            shared = tuple(self._index[h] for h in prompt.chain[before : found.hit])
            self._pages.retain(shared)
            self._pages.release(holding.pages[before : found.hit])
            holding.pages = (*holding.pages[:before], *shared, *holding.pages[found.hit :])
            holding.start = found.hit * page_tokens
        holding.demand = found.demand if found.demand > holding.start else 0
        self._count(prompt, found._replace(demand=holding.demand))

    def close(self, holding: Holding) -> None:
        """Its prompt is planned no further and caches nothing more; pages and slot stay until `release`. Idempotent."""
        self.slots.close(holding.tenant)

    def release(self, holding: Holding) -> None:
        """Give everything back. Pages with a hash stay for reuse, the end of the prompt to be evicted first."""
        self.slots.release(holding.tenant)
        self._pages.release(holding.pages, keep=self._hashes.__contains__)

    # ------------------------------------------------------------ plan and acknowledgement

    def row(self, holding: Holding, start: int, end: int) -> Row:
        """Freeze the next chunk of a prompt. May spend a checkpoint for a newer one."""
        prompt, key = holding.prompt, None
        reason = self.ladder.reason(end, prompt.length, holding.demand)
        if reason is not None and prompt.chain:
            key = prompt.chain[end // self.ladder.page_tokens - 1]
            self.counters.demands_cut += reason is Reason.DEMAND
        row = Row(holding, start, end, self.slots.row(holding.tenant, start, end, key))
        self._tell_removed()
        return row

    def acknowledge(self, rows: Sequence[Row]) -> None:
        """The plan of these rows is computed: lift holds, publish pages, file states, let go what was read.

        A filing that fails is counted, and costs nothing else: holds were lifted before, pins are let go after.
        """
        states = [row.state for row in rows]
        self.slots.lift_holds(states)
        try:
            for row in rows:
                self._publish(row)
            for row in rows:
                self._file(row)
        except FilingError as error:
            self.counters.filing_errors += 1
            log.warning("a checkpoint was not filed", extra={"error": str(error)})
        self.slots.unpin(states)
        self._tell_removed()

    def flush(self) -> tuple[int, int]:
        """Forget every page and checkpoint; what running prompts hold stays theirs. Returns how many of each."""
        n_pages, n_checkpoints = len(self._index), self.slots.clear()
        self._pages.drop_cached()
        self._index.clear()
        self._hashes.clear()
        self._gone.clear()
        self.on_event(Cleared())
        return n_pages, n_checkpoints

    # ------------------------------------------------------------ steps

    def _room(self, prompt: Prompt) -> int:
        return max(self.pages_for(prompt.length), prompt.room)

    def _publish(self, row: Row) -> None:
        """Make the pages that the row completed visible; a page that is there already stays the one."""
        holding, page_tokens = row.holding, self.ladder.page_tokens
        if not holding.tenant.is_open:
            return
        chain, stored = holding.prompt.chain, list[bytes]()
        for i in range(row.start // page_tokens, min(row.end // page_tokens, len(chain))):
            if i and chain[i - 1] not in self._index:
                break  # flushed or evicted in between: nothing behind it can be found
            if chain[i] not in self._index:
                self._index[chain[i]] = holding.pages[i]
                self._hashes[holding.pages[i]] = chain[i]
                stored.append(chain[i])
        if stored:
            self.on_event(Stored(pages=tuple(stored)))

    def _file(self, row: Row) -> None:
        key = row.state.key
        if key is None or not row.holding.tenant.is_open:
            return
        if key not in self._index:
            self.slots.counters.dropped += 1
            return
        self.slots.file(row.state)
        self._tell_removed()
        if key in self.slots:
            self.on_event(Stored(checkpoints=(key,)))

    def _evicted(self, page: int) -> None:
        """A page is handed out anew."""
        key = self._hashes.pop(page)
        del self._index[key]
        self._gone.append(key)
        if self.slots.drop(key):
            self._orphans.append(key)

    def _tell_removed(self) -> None:
        checkpoints = (*self._orphans, *self.slots.take_evicted())
        if self._gone or checkpoints:
            self.on_event(Removed(tuple(self._gone), checkpoints))
        self._gone.clear()
        self._orphans.clear()

    def _count(self, prompt: Prompt, found: Gate) -> None:
        counters, page_tokens = self.counters, self.ladder.page_tokens
        counters.query_tokens += prompt.length
        counters.chain_tokens += found.chain * page_tokens
        counters.wanted_tokens += found.wanted * page_tokens
        counters.hit_tokens += found.hit * page_tokens
        counters.demands_recorded += found.demand > 0
