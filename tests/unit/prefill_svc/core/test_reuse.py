"""Stories about prompts that find what earlier ones left: admission, cuts, holds, evictions, flushes.

Numbers in brackets are rows of the list of known defects of pipelined prefill with caches of states.
"""

from __future__ import annotations

import itertools

import pytest

from k3.cache.hash_chain import page_hashes, root
from prefill_svc.core.checkpoints import NO_SLOT, Mode
from prefill_svc.core.ladder import Ladder
from prefill_svc.core.scheduler import Plan, Policy, PrefillScheduler

pytestmark = pytest.mark.prefill

P = 4
ROOT = root("stories", P)


def scheduler(
    *,
    budget: int = 64,
    inflight: int = 1,
    interval: int = 16,
    anchor: bool = True,
    mode: Mode = Mode.FORK_AT_SCHEDULE,
    n_pages: int = 64,
    n_slots: int = 8,
    short: int = 64,
    queue: int = 4,
) -> PrefillScheduler:
    policy = Policy(
        token_budget=budget, max_inflight=inflight, chunk_align=P, max_running=4, max_queue=queue,
        short_len=short,
    )  # fmt: skip
    ladder = Ladder(P, interval, anchor)
    return PrefillScheduler(
        policy, n_pages=n_pages, n_slots=n_slots, page_tokens=P, ladder=ladder, mode=mode
    )


def submit(s: PrefillScheduler, key: int, n: int, *, own: int = 0, takes_hits: bool = True) -> None:
    """A prompt of n tokens, the last `own` of which no other prompt has."""
    tokens = [*range(n - own), *(1000 * key + i for i in range(own))]
    s.submit(key, n, 0.0, chain=page_hashes(ROOT, tokens, P), takes_hits=takes_hits)


def next_plan(s: PrefillScheduler) -> Plan:
    plan = s.plan(0.0)
    assert plan is not None
    return plan


def acknowledge(s: PrefillScheduler, plan: Plan) -> None:
    s.advance(plan.step_id, [(c.key, c.epoch) for c in plan.chunks if c.is_final])


def run(s: PrefillScheduler, key: int) -> list[tuple[int, int]]:
    """Compute a prompt to its end and let it go; its chunks."""
    chunks = []
    while not chunks or chunks[-1][1] < s.request(key).prompt_len:
        plan = next_plan(s)
        chunks += [(c.start, c.end) for c in plan.chunks if c.key == key]
        acknowledge(s, plan)
    s.release(key)
    return chunks


def test_the_same_prompt_again_computes_what_follows_its_last_whole_page() -> None:
    s = scheduler()
    submit(s, 1, 39)
    assert run(s, 1) == [(0, 36), (36, 39)]
    submit(s, 2, 39)
    assert s.findable(2) == 36
    plan = next_plan(s)
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.end, chunk.is_final) == (36, 39, True)
    assert chunk.read_slot not in (NO_SLOT, chunk.write_slot)
    assert s.request(2).hit_tokens == 36


def test_pages_without_a_state_are_no_hit_and_are_demanded_once() -> None:
    """First request finds nothing, the second pays one cut where the first left no state, the third hits."""
    s = scheduler(anchor=False, interval=32)
    submit(s, 1, 30)
    assert run(s, 1) == [(0, 30)]
    submit(s, 2, 40, own=20)
    assert run(s, 2) == [(0, 20), (20, 32), (32, 40)]
    submit(s, 3, 40, own=20)
    assert run(s, 3) == [(20, 32), (32, 40)]
    counters = s.cache.counters
    assert (counters.demands_recorded, counters.demands_cut) == (1, 1)
    assert (counters.wanted_tokens, counters.hit_tokens) == (40, 20)


def test_a_prompt_whose_every_token_is_asked_for_takes_no_hit() -> None:
    s = scheduler()
    submit(s, 1, 39)
    run(s, 1)
    submit(s, 2, 39, takes_hits=False)
    assert run(s, 2)[0][0] == 0


def test_pages_in_use_by_others_are_not_counted_twice() -> None:
    s = scheduler(n_pages=14)
    submit(s, 1, 40)
    while s.request(1).holding is None or s.request(1).remaining:
        acknowledge(s, next_plan(s))
    assert s.cache.available_pages == 4
    submit(s, 2, 44, own=8)
    plan = next_plan(s)
    assert [chunk.start for chunk in plan.chunks] == [36]
    assert s.page_counts().held == 12
    acknowledge(s, plan)
    while s.request(2).remaining:
        acknowledge(s, next_plan(s))
    assert s.pinned_pages == 12


def test_a_prompt_waits_when_pages_it_found_leave_too_few() -> None:
    s = scheduler(n_pages=14)
    submit(s, 1, 40)
    run(s, 1)
    submit(s, 2, 40, own=40)
    while s.request(2).holding is None or s.request(2).remaining:
        acknowledge(s, next_plan(s))
    submit(s, 3, 40)
    assert s.plan(0.0) is None
    s.release(2)
    assert next_plan(s).chunks[0].key == 3


def test_a_page_that_is_handed_out_anew_takes_its_checkpoint_along() -> None:
    s = scheduler(n_pages=12, n_slots=8)
    submit(s, 1, 40)
    run(s, 1)
    assert s.slot_counts().checkpoints > 0
    submit(s, 2, 48, own=48)
    next_plan(s)
    assert s.slot_counts().checkpoints == 0
    assert s.cache.slots.counters.orphaned > 0


def test_a_prompt_gets_the_last_slot_before_a_checkpoint_does() -> None:
    s = scheduler(n_slots=2, budget=40, short=8)
    submit(s, 1, 100)
    acknowledge(s, next_plan(s))
    assert s.slot_counts().checkpoints + s.slot_counts().pinned == 1
    submit(s, 2, 5, own=5)
    plan = next_plan(s)
    assert [c.key for c in plan.chunks] == [1], "its state is being read"
    acknowledge(s, plan)
    assert 2 in [c.key for c in next_plan(s).chunks]


def test_what_a_cut_leaves_of_the_budget_goes_to_others() -> None:
    s = scheduler(budget=40, interval=16, anchor=False)
    submit(s, 1, 30)
    submit(s, 2, 24, own=24)
    plan = next_plan(s)
    assert [(c.key, c.end) for c in plan.chunks] == [(1, 16), (2, 16)]


def test_a_held_prompt_is_planned_again_once_its_state_is_filed() -> None:
    """[12, 43] The next chunk would overwrite the state; an earlier chunk's acknowledgement does not end the hold."""
    s = scheduler(mode=Mode.FORK_HOLD, inflight=3, budget=8, anchor=False)
    submit(s, 1, 60)
    first, second = next_plan(s), next_plan(s)
    assert [p.chunks[0].end for p in (first, second)] == [8, 16]
    assert s.plan(0.0) is None
    acknowledge(s, first)
    assert s.plan(0.0) is None
    assert s.n_held == 1
    acknowledge(s, second)
    (chunk,) = next_plan(s).chunks
    assert chunk.read_slot == second.chunks[0].write_slot != chunk.write_slot


def test_a_long_prompt_that_is_held_is_still_one_of_the_long_ones() -> None:
    """No second one starts beside it, and short ones do."""
    s = scheduler(mode=Mode.FORK_HOLD, inflight=3, budget=16, anchor=False, short=8)
    submit(s, 1, 60)
    plan = next_plan(s)
    assert s.n_held == 1
    submit(s, 2, 60, own=60)
    assert s.plan(0.0) is None
    submit(s, 3, 7, own=7)
    assert [c.key for c in next_plan(s).chunks] == [3]
    acknowledge(s, plan)


class Chain(tuple[bytes, ...]):
    """Hashes that count how often they are read."""

    n_reads = 0

    def __getitem__(self, at):
        Chain.n_reads += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("n_waiting", [9, 60])
def test_a_plan_looks_up_as_many_waiting_long_prompts_as_could_run_whatever_waits(
    n_waiting: int,
) -> None:
    """Each of them finds nothing, which is one read; a short prompt behind them all still passes."""
    s = scheduler(budget=16, inflight=3, short=8, queue=99, n_pages=999)
    for key in range(1, n_waiting + 2):
        tokens = range(1000 * key, 1000 * key + 60)
        s.submit(key, 60, 0.0, chain=Chain(page_hashes(ROOT, tokens, P)))
    assert [c.key for c in next_plan(s).chunks] == [1]
    submit(s, 999, 7, own=7)
    Chain.n_reads = 0
    assert [c.key for c in next_plan(s).chunks] == [1, 999]
    assert 0 < Chain.n_reads <= 4 + 2, "beside the one that runs: its states are filed by hash"


def test_a_hold_ends_when_its_owner_leaves() -> None:
    """[13] At once, though its chunk is in flight: nothing of it is left behind, and others are planned."""
    s = scheduler(mode=Mode.FORK_HOLD, inflight=3, budget=16, anchor=False)
    submit(s, 1, 60)
    plan = next_plan(s)
    left = s.request(1)
    assert left.is_held
    s.abort(1)
    assert not left.is_held
    assert s.n_held == 0
    s.release(1)
    submit(s, 2, 5)
    assert next_plan(s).chunks[0].key == 2
    acknowledge(s, plan)
    assert s.slot_counts().pinned == 0


def test_forked_chunks_follow_each_other_without_waiting() -> None:
    """[12] Every rung keeps its own slot, and the next chunk reads it and writes elsewhere."""
    s = scheduler(inflight=3, budget=16, anchor=False)
    submit(s, 1, 60)
    chunks = [next_plan(s).chunks[0] for _ in range(3)]
    for before, after in itertools.pairwise(chunks):
        assert after.read_slot == before.write_slot != after.write_slot
    assert len({c.write_slot for c in chunks}) == 3


def test_a_copied_state_leaves_the_prompt_in_its_slot() -> None:
    s = scheduler(mode=Mode.COPY, budget=16, anchor=False)
    submit(s, 1, 40)
    first = next_plan(s)
    acknowledge(s, first)
    second = next_plan(s)
    assert first.chunks[0].copy_slot not in (NO_SLOT, first.chunks[0].write_slot)
    assert second.chunks[0].read_slot == second.chunks[0].write_slot == first.chunks[0].write_slot


def test_a_checkpoint_becomes_visible_with_the_acknowledgement_of_its_own_plan() -> None:
    """[24] A middle chunk is acknowledged like any other, and files what it has."""
    s = scheduler(inflight=2, budget=16, anchor=False)
    submit(s, 1, 40)
    first, _second = next_plan(s), next_plan(s)
    assert s.cache.checkpoints() == {}
    acknowledge(s, first)
    assert len(s.cache.checkpoints()) == 1
    assert len(s.cache.pages()) == 4


def test_what_an_aborted_prompt_had_in_flight_is_not_cached() -> None:
    """[42] What a chunk does at its acknowledgement was frozen when it was planned, and its owner is gone."""
    s = scheduler(budget=16)
    submit(s, 1, 40)
    plan = next_plan(s)
    s.abort(1)
    s.release(1)
    acknowledge(s, plan)
    assert not s.cache.pages()
    assert s.slot_counts().free == 8


def test_a_flush_forgets_pages_and_states_but_not_what_runs() -> None:
    s = scheduler(budget=16)
    submit(s, 1, 40)
    acknowledge(s, next_plan(s))
    assert s.cache.flush() == (4, 1)
    assert run(s, 1)[-1] == (36, 40)
    assert not s.cache.checkpoints()
    submit(s, 2, 40)
    assert s.findable(2) == 0
    assert s.page_counts().free == 64


def test_a_held_chunk_lies_strictly_inside_its_prompt() -> None:
    """[32] Targets leave room for a successor, so a final chunk never files and never holds."""
    for n in (16, 17, 32, 33):
        s = scheduler(mode=Mode.FORK_HOLD, inflight=2)
        submit(s, 1, n)
        end = 0
        while end < n:
            plan = next_plan(s)
            end = plan.chunks[0].end
            assert s.n_held == (end < n)
            acknowledge(s, plan)


@pytest.mark.parametrize("mode", Mode, ids=[mode.value for mode in Mode])
def test_a_computed_prompt_has_its_state_in_its_own_slot(mode: Mode) -> None:
    """[14, 15, 16, 25, 45] No generation step ever has to read another slot than it writes, so none can forget to."""
    for n in range(1, 40):
        s = scheduler(mode=mode, inflight=2, budget=12)
        submit(s, 1, n)
        plan = None
        while plan is None or not plan.chunks[0].is_final:
            plan = next_plan(s)
            acknowledge(s, plan)
        holding = s.request(1).holding
        assert holding.tenant.source == NO_SLOT
        assert holding.tenant.live == plan.chunks[0].write_slot


def test_a_slot_that_is_handed_out_anew_is_written_before_it_is_read() -> None:
    """[29] Whoever starts from zero reads nothing, whoever forks reads the checkpoint: no tenant's rest is seen."""
    s = scheduler(n_slots=2)
    for key in range(1, 6):
        submit(s, key, 30, own=30)
        first = True
        while s.request(key) is not None:
            plan = next_plan(s)
            (chunk,) = plan.chunks
            assert (chunk.read_slot == NO_SLOT) == first
            first = False
            acknowledge(s, plan)
            if chunk.is_final:
                s.release(key)
