"""A prefill instance in one process: scheduler and cache, and ranks that remember what was written where.

Ranks execute plans in order, at once or as late as the acknowledgement. A state is the digest of all tokens it has
seen, a page the digest at its end: whoever reads something else than its own prompt would have left there, sees it.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

from k3.cache.hash_chain import page_hashes, root
from k3.errors import QueueFull
from prefill_svc.core.cache_events import CacheEvent, Cleared, Removed, Stored
from prefill_svc.core.checkpoints import NO_SLOT, FilingError, Mode, StateRow, StateSlots
from prefill_svc.core.ladder import Ladder
from prefill_svc.core.request import State
from prefill_svc.core.scheduler import Plan, Policy, PrefillScheduler

P = 4
N_PAGES = 40
ROOT = root("simulated", P)
BASES = tuple(tuple(random.Random(b).randrange(9) for _ in range(96)) for b in range(3))


class CorruptState(AssertionError):
    """Something was read that is not what the prompt would have left there."""


class FaultySlots(StateSlots):
    """Files badly when told to."""

    is_faulty = False

    def file(self, row: StateRow) -> None:
        if self.is_faulty and row.key is not None:
            self.is_faulty = False
            raise FilingError("told to")
        StateSlots.file(self, row)


@dataclass
class Told:
    """One prompt, and the digests of its prefixes."""

    tokens: tuple[int, ...]
    digests: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.digests = list(itertools.accumulate(self.tokens, lambda d, t: hash((d, t)), initial=0))


class World:
    def __init__(
        self, mode: Mode, *, inflight: int, n_slots: int, is_eager: bool, has_holds: bool = True
    ) -> None:
        policy = Policy(
            token_budget=24, max_inflight=inflight, chunk_align=P, max_running=5, max_queue=6,
            short_len=12, max_long=2,
        )  # fmt: skip
        self.scheduler = PrefillScheduler(
            policy,
            n_pages=N_PAGES,
            n_slots=n_slots,
            page_tokens=P,
            ladder=Ladder(P, 2 * P, has_anchor=True),
            mode=mode,
            on_event=self.heard,
        )
        self.cache = self.scheduler.cache
        self.slots = FaultySlots(n_slots, mode, has_holds and inflight > 1)
        self.cache.slots = self.slots
        self.is_eager = is_eager
        self.prompts: dict[int, Told] = {}
        self.open: set[int] = set()
        self.plans: deque[Plan] = deque()
        self.n_executed = 0  # of the plans in flight
        self.page_memory: dict[int, tuple[int, int]] = {}  # tokens in it, digest behind them
        self.slot_memory: dict[int, int] = {}
        self.by_hash: dict[bytes, int] = {}
        self.followed: tuple[set[bytes], set[bytes]] = (set(), set())

    # ------------------------------------------------------------ what can happen

    def arrive(self, base: int, shared: int, own: int, *, takes_hits: bool = True) -> None:
        """A prompt that shares its first tokens with others."""
        key = len(self.prompts) + 1
        tokens = (*BASES[base][:shared], *(10 + key + i for i in range(own)))
        told = Told(tokens)
        chain = page_hashes(ROOT, tokens, P)
        try:
            self.scheduler.submit(key, len(tokens), 0.0, chain=chain, takes_hits=takes_hits)
        except QueueFull:
            return
        self.prompts[key] = told
        self.open.add(key)
        self.by_hash |= {h: told.digests[(i + 1) * P] for i, h in enumerate(chain)}

    def plan(self) -> bool:
        plan = self.scheduler.plan(0.0)
        if plan is None:
            return False
        self.plans.append(plan)
        if self.is_eager:
            self.execute()
        return True

    def execute(self) -> None:
        """The ranks run the oldest plan they have not run yet."""
        if self.n_executed == len(self.plans):
            return
        plan = self.plans[self.n_executed]
        self.n_executed += 1
        for chunk in plan.chunks:
            others = {c.read_slot for c in plan.chunks if c is not chunk}
            assert not others & {chunk.write_slot, chunk.copy_slot} - {NO_SLOT}, "rows of one step"
            digests = self.prompts[chunk.key].digests
            if chunk.start == 0:
                assert chunk.read_slot == NO_SLOT
            elif self.slot_memory.get(chunk.read_slot) != digests[chunk.start]:
                raise CorruptState(f"slot {chunk.read_slot} read by prompt {chunk.key}")
            self.check_pages(chunk.pages, digests, chunk.start)
            for i in range(chunk.start // P, -(-chunk.end // P)):
                end = min(chunk.end, (i + 1) * P)
                self.page_memory[chunk.pages[i]] = (end - i * P, digests[end])
            for slot in {chunk.write_slot, chunk.copy_slot} - {NO_SLOT}:
                self.slot_memory[slot] = digests[chunk.end]

    def acknowledge(self, *, is_faulty: bool = False) -> None:
        if not self.plans:
            return
        if not self.n_executed:
            self.execute()
        plan = self.plans.popleft()
        self.n_executed -= 1
        self.slots.is_faulty = is_faulty
        self.scheduler.advance(plan.step_id, [(c.key, c.epoch) for c in plan.chunks if c.is_final])
        self.slots.is_faulty = False

    def abort(self, key: int) -> None:
        self.scheduler.abort(key)

    def let_go(self, key: int) -> None:
        """The transfer is over; until now pages and state were those of the whole prompt."""
        request = self.scheduler.request(key)
        assert request is not None
        if request.state is State.SENDING:
            self.check_sent(key)
        if request.state in (State.SENDING, State.ABORTED):
            self.scheduler.release(key)
            self.open.remove(key)

    def flush(self) -> None:
        self.cache.flush()

    def heard(self, event: CacheEvent) -> None:
        pages, checkpoints = self.followed
        match event:
            case Stored():
                pages.update(event.pages)
                checkpoints.update(event.checkpoints)
            case Removed():
                pages.difference_update(event.pages)
                checkpoints.difference_update(event.checkpoints)
            case Cleared():
                pages.clear()
                checkpoints.clear()

    # ------------------------------------------------------------ what must hold

    def check_pages(self, pages: tuple[int, ...], digests: list[int], n_tokens: int) -> None:
        for i in range(-(-n_tokens // P)):
            end = min(n_tokens, (i + 1) * P)
            if self.page_memory.get(pages[i]) != (end - i * P, digests[end]):
                raise CorruptState(f"page {pages[i]}")

    def check_sent(self, key: int) -> None:
        request, digests = self.scheduler.request(key), self.prompts[key].digests
        assert request is not None
        assert request.holding is not None
        if request.holding.tenant.source != NO_SLOT:
            raise CorruptState(f"prompt {key} has its state in another slot than its own")
        self.check_pages(request.pages, digests, request.prompt_len)
        if self.slot_memory.get(request.slot) != digests[-1]:
            raise CorruptState(f"slot {request.slot} sent for prompt {key}")

    def check(self) -> None:
        """What is cached is what its hash says; nothing is lost, or owned twice; a follower knows it all."""
        cache, scheduler = self.cache, self.scheduler
        pages, checkpoints = cache.pages(), cache.checkpoints()
        for key, page in pages.items():
            if self.page_memory.get(page) != (P, self.by_hash[key]):
                raise CorruptState(f"cached page {page}")
        for key, slot in checkpoints.items():
            if self.slot_memory.get(slot) != self.by_hash[key]:
                raise CorruptState(f"checkpoint {slot}")
        assert checkpoints.keys() <= pages.keys(), "a checkpoint that cannot be reached"
        assert self.followed == (pages.keys(), checkpoints.keys())
        requests = [r for key in self.open if (r := scheduler.request(key)) is not None]
        running = [r for r in requests if r.holding is not None]
        counts = cache.page_counts()
        assert counts.held == len({page for r in running for page in r.pages})
        assert counts.free + counts.held + counts.cached == N_PAGES
        live = [r.slot for r in running]
        slots = cache.slot_counts()
        assert slots.held == len(live) == len(set(live))
        assert slots.free + slots.held + slots.pinned + slots.checkpoints == slots.total
        assert not set(live) & set(checkpoints.values()), "a filed slot may be written"

    def finish(self) -> None:
        """Without new arrivals every prompt ends, and nothing but the cache is left."""
        for _ in range(3000):
            if not self.open:
                break
            self.plan()
            self.acknowledge()
            for key in sorted(self.open):
                self.let_go(key)
        while self.plans:
            self.acknowledge()
        assert not self.open, "a prompt never ends"
        self.check()
        slots, pages = self.cache.slot_counts(), self.cache.page_counts()
        assert (slots.held, slots.pinned, pages.held) == (0, 0, 0)
        self.flush()
        assert self.cache.page_counts().free == N_PAGES
        assert self.cache.slot_counts().free == slots.total


def live_through(world: World, rng: random.Random, n_events: int) -> None:
    """A random history."""
    for _ in range(n_events):
        key = rng.choice(sorted(world.open)) if world.open else 0
        match rng.choices(range(7), (16, 34, 12, 30, 2, 9, 0.3))[0]:
            case 0:
                shared = rng.choice((0, 7, 16, 33, 64, 90))
                world.arrive(rng.randrange(3), shared, rng.randrange(1, 40))
            case 1:
                world.plan()
            case 2:
                world.execute()
            case 3:
                world.acknowledge(is_faulty=rng.random() < 0.05)
            case 4 if key:
                world.abort(key)
            case 5 if key:
                world.let_go(key)
            case 6:
                world.flush()
            case _:
                pass
    world.check()
