"""The promises of the decode scheduler under any order of events.

Random arrivals, fillings, failed candidates, aborts and acknowledgements against scripted ranks that answer in order
and emit one to `group_len` tokens per row. A model of every page and slot checks that none is held twice or lost.
"""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_svc.capacity import worst_len
from decode_svc.ledger import Ledger
from decode_svc.memory import PoolMemory
from decode_svc.request import DecodeRequest, RequestSpec, State
from decode_svc.scheduler import DecodeScheduler, Emitted, Hold, Limits, Plan
from k3.cache.pages import PagePool
from k3.cache.slots import SlotPool
from k3.errors import QueueFull, RequestRejected
from k3.types import FinishReason, RequestId, SamplingParams, StopParams, TokenEvent

P, N_PAGES, N_SLOTS, N_ROWS, MAX_LEN = 4, 13, 5, 4, 60
END = 9


class Simulation(RuleBasedStateMachine):
    """Few pages, fewer rows than slots, two kinds of groups and depths."""

    @initialize(
        cp=st.sampled_from([1, 2, 4]), depth=st.sampled_from([1, 2]), k=st.sampled_from([0, 3])
    )
    def begin(self, cp: int, depth: int, k: int) -> None:
        self.limits = Limits(max_queue=4, max_model_len=MAX_LEN, depth=depth, draft_tokens=k)
        self.scheduler = DecodeScheduler(
            Ledger(P, cp),
            self.limits,
            memory=PoolMemory(PagePool(N_PAGES), SlotPool(N_SLOTS, first=1)),
            rows=SlotPool(N_ROWS, first=1),
        )
        self.requests: list[DecodeRequest] = []
        self.plans: deque[Plan] = deque()
        self.holds: list[Hold] = []
        self.open_rows: dict[int, int] = {}  # row -> epoch, as a rank's table would hold it
        self.last_step = 0
        self.clock = 0.0

    def _in(self, *states: State) -> list[DecodeRequest]:
        return [r for r in self.requests if r.state in states]

    # -------------------------------------------------------- arrival

    @rule(n=st.integers(1, 50), m=st.integers(1, 30))
    def arrive(self, n: int, m: int) -> None:
        spec = RequestSpec(
            RequestId(str(len(self.requests))), (1,) * n, SamplingParams(), StopParams(m, (END,))
        )
        needed = self.scheduler.ledger.pages(
            worst_len(n, m, self.limits.draft_tokens, self.limits.depth - 1)
        )
        try:
            request = self.scheduler.submit(spec, self.clock)
        except RequestRejected:
            assert n + m > MAX_LEN or needed > N_PAGES
            return
        except QueueFull:
            assert len(self._in(State.QUEUED)) >= self.limits.max_queue
            return
        assert n + m <= MAX_LEN
        assert needed <= N_PAGES
        self.requests.append(request)

    @rule()
    def admit(self) -> None:
        waiting = self._in(State.QUEUED)
        admitted = self.scheduler.admit(self.clock)
        assert admitted == waiting[: len(admitted)], "not first in, first out"
        for request in admitted:
            limits, spec = self.limits, request.spec
            worst = worst_len(
                len(spec.prompt), spec.stop.max_tokens, limits.draft_tokens, limits.depth - 1
            )
            assert len(request.held.pages) == self.scheduler.ledger.pages(worst)

    # -------------------------------------------------------- filling

    @precondition(lambda self: self._in(State.ADMITTED))
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        self.scheduler.fill(data.draw(st.sampled_from(self._in(State.ADMITTED))))

    @precondition(lambda self: self._in(State.FILLING))
    @rule(data=st.data(), ends=st.booleans())
    def complete(self, data: st.DataObject, ends: bool) -> None:
        request = data.draw(st.sampled_from(self._in(State.FILLING)))
        kept = self.scheduler.first_token(request, TokenEvent(END if ends else 1))
        assert (kept.finish is not None) == (ends or request.spec.stop.max_tokens == 1)
        if kept.finish is None:
            self.scheduler.filled(request)
        else:
            self._hold(self.scheduler.drop(request))

    @precondition(lambda self: self._in(State.FILLING))
    @rule(data=st.data())
    def lose_candidate(self, data: st.DataObject) -> None:
        self._hold(self.scheduler.requeue(data.draw(st.sampled_from(self._in(State.FILLING)))))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def prove_quiet(self, data: st.DataObject) -> None:
        self.scheduler.settle(self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))))

    @precondition(lambda self: self._in(State.QUEUED, State.ADMITTED, State.FILLING))
    @rule(data=st.data())
    def abort_early(self, data: st.DataObject) -> None:
        early = self._in(State.QUEUED, State.ADMITTED, State.FILLING)
        self._hold(self.scheduler.drop(data.draw(st.sampled_from(early))))

    def _hold(self, hold: Hold | None) -> None:
        if hold is not None:
            self.holds.append(hold)

    # -------------------------------------------------------- steps

    @precondition(lambda self: self._in(State.RUNNING))
    @rule(data=st.data())
    def abort_running(self, data: st.DataObject) -> None:
        self.scheduler.abort(data.draw(st.sampled_from(self._in(State.RUNNING))))

    @rule()
    def plan(self) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            full = len(self.plans) == self.limits.depth
            assert full or not any(self._can_gain(r) for r in self._in(State.RUNNING))
            return
        assert plan.step_id == self.last_step + 1
        assert plan.rows
        self.last_step = plan.step_id
        for row in plan.closed:
            assert self.open_rows.pop(row.index) == row.epoch
        for request in plan.opened:
            row = request.held.row
            assert row.index not in self.open_rows
            self.open_rows[row.index] = row.epoch
        for step in plan.rows:
            assert self.open_rows[step.row.index] == step.row.epoch
            reach = self.scheduler.ledger.pages(step.base_bound + plan.group_len)
            assert reach <= len(step.request.held.pages)
        self.plans.append(plan)

    def _can_gain(self, request: DecodeRequest) -> bool:
        return len(request.outputs) + request.plans_in_flight < request.spec.stop.max_tokens

    @precondition(lambda self: self.plans)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        plan = self.plans.popleft()
        emitted = [
            Emitted(
                step.row.index,
                step.row.epoch,
                tuple(
                    TokenEvent(END if data.draw(st.integers(0, 9)) == 0 else 1)
                    for _ in range(data.draw(st.integers(1, plan.group_len)))
                ),
            )
            for step in plan.rows
        ]
        running = {step.request.key for step in plan.rows if step.request.state is State.RUNNING}
        before = {step.request.key: len(step.request.outputs) for step in plan.rows}
        for request, kept in self.scheduler.advance(plan.step_id, emitted):
            assert request.key in running
            assert 1 <= len(kept.tokens) <= plan.group_len
            assert len(request.outputs) == before[request.key] + len(kept.tokens)
            assert len(request.outputs) <= request.spec.stop.max_tokens
            ids = [token.id for token in request.outputs]
            assert END not in ids[:-1]
            match kept.finish:
                case FinishReason.STOP:
                    assert ids[-1] == END
                case FinishReason.LENGTH:
                    assert len(ids) == request.spec.stop.max_tokens
                case None:
                    assert request.base == request.prompt_len + len(ids) - 1

    # -------------------------------------------------------- laws

    @invariant()
    def no_page_or_slot_is_held_twice_or_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        holders = [r.reservation for r in self.requests if r.reservation is not None]
        held = [page for h in holders for page in h.pages]
        quarantined = [page for hold in self.holds for page in hold.pages]
        assert len(set(held + quarantined)) == len(held) + len(quarantined)
        counts = scheduler.memory.page_counts()
        assert (counts.held, counts.quarantined) == (len(held), len(quarantined))
        assert counts.free == N_PAGES - len(held) - len(quarantined)
        slots = scheduler.memory.slot_counts()
        assert (slots.held, slots.quarantined) == (len(holders), len(self.holds))
        assert scheduler.rows.counts().held == len(holders)
        dummies = [h for h in holders if h.state_slot == 0 or h.row.index == 0]
        assert not dummies

    @invariant()
    def memory_of_a_row_in_flight_is_never_free(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        named = {step.request.key for plan in self.plans for step in plan.rows}
        for request in self.requests:
            if request.key in named:
                assert request.reservation is not None
            assert (request.reservation is None) == (request.state in (State.QUEUED, State.GONE))

    @invariant()
    def tokens_in_flight_are_those_of_the_plans(self) -> None:
        for request in self.requests if hasattr(self, "scheduler") else ():
            steps = [s for plan in self.plans for s in plan.rows if s.request is request]
            assert request.most_in_flight == sum(1 + step.draft_len for step in steps)

    def teardown(self) -> None:
        """Every request ends and the pools return to where they began."""
        if not hasattr(self, "scheduler"):
            return
        for request in self._in(State.QUEUED, State.ADMITTED, State.FILLING):
            self._hold(self.scheduler.drop(request))
        for _ in range(500):
            self.plan()
            if not self.plans:
                break
            plan = self.plans.popleft()
            emitted = [Emitted(s.row.index, s.row.epoch, (TokenEvent(1),)) for s in plan.rows]
            self.scheduler.advance(plan.step_id, emitted)
        for hold in self.holds:
            self.scheduler.settle(hold)
        assert all(r.state is State.GONE for r in self.requests), self._in(
            *set(State) - {State.GONE}
        )
        assert self.scheduler.memory.page_counts().free == N_PAGES
        assert self.scheduler.memory.slot_counts().free == N_SLOTS
        assert self.scheduler.rows.counts().free == N_ROWS
        assert self.scheduler.open_requests() == []


TestDecodeScheduler = Simulation.TestCase
