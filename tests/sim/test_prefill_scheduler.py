"""The promises of the prefill scheduler under any order of events.

Random arrivals, aborts, acknowledgements and releases against a scripted group of ranks that answers in order.
"""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from k3.errors import QueueFull
from prefill_svc.core.request import State
from prefill_svc.core.scheduler import Plan, Policy, PrefillScheduler

pytestmark = pytest.mark.prefill

P = 4
N_PAGES = 24
N_SLOTS = 5


class Simulation(RuleBasedStateMachine):
    """Prompts of up to the whole pool, two plans in flight, fewer slots than the queue is long."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy(
            token_budget=19, max_inflight=2, chunk_align=P, max_running=4, max_queue=6, short_len=8
        )
        self.scheduler = PrefillScheduler(
            self.policy, n_pages=N_PAGES, n_slots=N_SLOTS, page_tokens=P
        )
        self.plans: deque[Plan] = deque()
        self.open: set[int] = set()
        self.covered: dict[int, int] = {}
        self.next_key = 0
        self.last_step = 0

    @rule(prompt_len=st.integers(1, N_PAGES * P))
    def arrive(self, prompt_len: int) -> None:
        self.next_key += 1
        try:
            self.scheduler.submit(self.next_key, prompt_len, 0.0)
        except QueueFull:
            return
        self.open.add(self.next_key)
        self.covered[self.next_key] = 0

    @rule()
    def take_plan(self) -> None:
        plan = self.scheduler.plan(0.0)
        if plan is None:
            return
        assert plan.step_id == self.last_step + 1
        self.last_step = plan.step_id
        assert 0 < plan.n_tokens <= self.policy.token_budget
        keys = [c.key for c in plan.chunks]
        assert len(set(keys)) == len(keys), "two chunks of one prompt in one plan"
        for chunk in plan.chunks:
            request = self.scheduler.request(chunk.key)
            assert request is not None
            assert chunk.start == self.covered[chunk.key], (
                "prompts are covered without gap or overlap"
            )
            self.covered[chunk.key] = chunk.end
            assert chunk.is_final == (chunk.end == request.prompt_len)
            assert len(chunk.pages) == -(-chunk.end // P)
        self.plans.append(plan)
        assert len(self.plans) <= self.policy.max_inflight

    @precondition(lambda self: self.plans)
    @rule()
    def acknowledge(self) -> None:
        plan = self.plans.popleft()
        finals = [(c.key, c.epoch) for c in plan.chunks if c.is_final]
        for chunk in self.scheduler.advance(plan.step_id, finals):
            assert chunk.key in self.open

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.open)))
        self.scheduler.abort(key)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.open)))
        self._let_go(key)

    def _let_go(self, key: int) -> None:
        request = self.scheduler.request(key)
        assert request is not None
        if request.state in (State.SENDING, State.ABORTED):
            self.scheduler.release(key)
            self.open.remove(key)

    @invariant()
    def no_page_or_slot_has_two_owners_and_none_is_lost(self) -> None:
        requests = [self.scheduler.request(key) for key in self.open]
        held = [page for r in requests if r is not None for page in r.pages]
        slots = [r.slot for r in requests if r is not None and r.pages]
        assert len(set(held)) == len(held)
        assert len(set(slots)) == len(slots)
        pages = self.scheduler.page_counts()
        assert pages.held == len(held)
        assert pages.free == N_PAGES - len(held)
        assert self.scheduler.slot_counts().held == len(slots)
        assert self.scheduler.n_running <= self.policy.max_running

    def teardown(self) -> None:
        """Without new arrivals every prompt ends and the pools return to where they started."""
        for _ in range(2000):
            if not self.open:
                break
            self.take_plan()
            if self.plans:
                self.acknowledge()
            for key in sorted(self.open):
                self._let_go(key)
        while self.plans:
            self.acknowledge()
        assert not self.open, "a prompt never ends"
        assert self.scheduler.n_open == self.scheduler.n_inflight == 0
        assert self.scheduler.page_counts().free == N_PAGES
        assert self.scheduler.slot_counts().free == N_SLOTS


Simulation.TestCase.settings = settings(
    deadline=None,
    max_examples=60,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow],
)
TestPrefillScheduler = Simulation.TestCase


@settings(deadline=None, max_examples=60)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 300)), min_size=1, max_size=25),
    inflight=st.integers(1, 3),
)
def test_a_short_prompt_starts_within_the_promised_number_of_steps(
    arrivals: list[tuple[int, int]], inflight: int
) -> None:
    """Short prompts ahead worth q tokens: at most ceil(q / reserve) + plans in flight steps, long ones or not."""
    budget, short_len = 64, 16
    policy = Policy(
        token_budget=budget,
        max_inflight=inflight,
        chunk_align=P,
        max_running=100,
        max_queue=100,
        short_len=short_len,
        max_long=2,
    )
    scheduler = PrefillScheduler(policy, n_pages=4000, n_slots=100, page_tokens=P)
    reserve = budget // 4
    due: dict[int, int] = {}
    shorts: dict[int, int] = {}
    plans: deque[Plan] = deque()
    pending = sorted(enumerate(arrivals), key=lambda item: (item[1][0], item[0]))
    step = 0
    while pending or plans or scheduler.waiting_tokens:
        while pending and pending[0][1][0] <= step:
            key, (_, prompt_len) = pending.pop(0)
            ahead = (
                sum(shorts.values()) + budget
            )  # a long one may turn short with less than a step left
            scheduler.submit(key, prompt_len, float(step))
            if prompt_len <= short_len:
                due[key] = step + -(-(ahead + prompt_len) // reserve) + inflight
                shorts[key] = prompt_len
        plan = scheduler.plan(0.0)
        if plan is not None:
            plans.append(plan)
            for chunk in plan.chunks:
                shorts.pop(chunk.key, None)
                if chunk.key in due and chunk.start == 0:
                    assert step <= due[chunk.key], f"prompt {chunk.key} started late"
        if plans and (plan is None or len(plans) == inflight):
            done = plans.popleft()
            scheduler.advance(done.step_id, [(c.key, c.epoch) for c in done.chunks if c.is_final])
        step += 1
        assert step < 5000
