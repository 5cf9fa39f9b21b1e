"""Thousands of histories of the prefix cache: no prompt ever continues from another one's state, and nothing leaks."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefill_svc.core.checkpoints import Mode
from tests.sim.cache_world import CorruptState, World, live_through

pytestmark = pytest.mark.prefill

HISTORIES, EVENTS = 4, 80


@pytest.mark.parametrize("mode", Mode, ids=[mode.value for mode in Mode])
@settings(deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_every_state_that_is_read_is_the_prompts_own(mode: Mode, seed: int) -> None:
    """Sharing prompts, aborts, faulty filings, flushes; ranks that run at once, late, or whenever."""
    rng = random.Random(seed)
    for _ in range(HISTORIES):
        world = World(
            mode,
            inflight=rng.randrange(1, 5),
            n_slots=rng.randrange(1, 9),
            is_eager=rng.random() < 0.4,
        )
        live_through(world, rng, EVENTS)
        world.finish()


def test_forks_without_holds_are_caught() -> None:
    """The negative control: filing at the acknowledgement while the next chunk is under way corrupts states."""
    caught = 0
    for seed in range(20):
        world = World(
            Mode.FORK_HOLD, inflight=3, n_slots=12, is_eager=seed % 2 == 0, has_holds=False
        )
        try:
            live_through(world, random.Random(seed), 4 * EVENTS)
            world.finish()
        except CorruptState:
            caught += 1
    assert caught == 20


def test_histories_are_not_empty() -> None:
    """They hit, evict, orphan, drop and fail: else the other tests would show nothing."""
    seen = dict.fromkeys(
        ("kept", "dropped", "evicted", "orphaned", "hit_tokens", "demands_cut", "filing_errors"), 0
    )
    for seed in range(30):
        world = World(Mode.FORK_AT_SCHEDULE, inflight=2, n_slots=7, is_eager=False)
        live_through(world, random.Random(seed), 2 * EVENTS)
        for counters in (world.cache.counters, world.slots.counters):
            for name in seen:
                seen[name] += getattr(counters, name) if name in counters.__slots__ else 0
    assert min(seen.values()) > 10, seen


class Machine(RuleBasedStateMachine):
    """The same world, one event at a time, for failures that shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(Mode.FORK_AT_SCHEDULE, inflight=2, n_slots=4, is_eager=False)

    @rule(
        base=st.integers(0, 1),
        shared=st.sampled_from((0, 8, 33, 60)),
        own=st.integers(1, 30),
        takes_hits=st.booleans(),
    )
    def arrive(self, base: int, shared: int, own: int, takes_hits: bool) -> None:
        self.world.arrive(base, shared, own, takes_hits=takes_hits)

    @rule()
    def plan(self) -> None:
        self.world.plan()

    @precondition(lambda self: self.world.plans)
    @rule(is_faulty=st.booleans())
    def acknowledge(self, is_faulty: bool) -> None:
        self.world.acknowledge(is_faulty=is_faulty)

    @precondition(lambda self: self.world.open)
    @rule(data=st.data(), is_abort=st.booleans())
    def leave(self, data: st.DataObject, is_abort: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.world.open)))
        if is_abort:
            self.world.abort(key)
        self.world.let_go(key)

    @rule()
    def flush(self) -> None:
        self.world.flush()

    @invariant()
    def all_is_in_order(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.finish()


Machine.TestCase.settings = settings(
    deadline=None,
    max_examples=25,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow],
)
TestPrefixCache = Machine.TestCase
