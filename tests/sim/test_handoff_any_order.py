"""The handoff under any order of events, against scripted movers and a virtual clock.

What must hold: nothing is reused before it is quiet, `Quiesced` and `Committed` are never said too early, every
stream ends once, and with nobody left the pools are where they started.
"""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from k3.errors import (
    QueueFull,
    ReconnectRequired,
)
from k3.v1 import prefill_pb2
from prefill_svc.core.scheduler import Plan
from prefill_svc.export import Export, Phase
from tests.sim.handoff_world import World
from tests.sim.prefill_ranks import (
    Stream,
    acknowledge,
)


class AnyOrder(RuleBasedStateMachine):
    """Everything that can happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(budget=8, inflight=2)
        self.plans: deque[Plan] = deque()
        self.calls: dict[int, tuple[Export, Stream, int | None]] = {}
        self.n_transfers = 0

    @rule(prompt_len=st.integers(1, 40), has_destination=st.booleans())
    def arrive(self, prompt_len: int, has_destination: bool) -> None:
        try:
            export, stream = self.world.open(prompt_len)
        except (QueueFull, ReconnectRequired):
            return
        self.calls[export.key] = (export, stream, None)
        if has_destination:
            self._send_destination(export.key)

    def _send_destination(self, key: int) -> None:
        export, stream, transfer_id = self.calls[key]
        if transfer_id is None and not stream.is_finished:
            self.n_transfers += 1
            self.world.send_destination(export, 1000 + self.n_transfers)
            self.calls[key] = (export, stream, 1000 + self.n_transfers)

    def _some(self, data: st.DataObject) -> Export:
        key = data.draw(st.sampled_from(sorted(self.calls)))
        return self.calls[key][0]

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def destination(self, data: st.DataObject) -> None:
        self._send_destination(self._some(data).key)

    @rule()
    def plan(self) -> None:
        plan = self.world.scheduler.plan(0.0)
        if plan is not None:
            self.plans.append(plan)
            self.world.handoff.planned(plan.step_id, plan.chunks)

    @precondition(lambda self: self.plans)
    @rule()
    def acknowledge(self) -> None:
        acknowledge(self.world.scheduler, self.world.handoff, self.plans.popleft())

    @precondition(lambda self: self.world.movers.can_send())
    @rule(data=st.data())
    def rank_sends(self, data: st.DataObject) -> None:
        self.world.movers.send(*data.draw(st.sampled_from(self.world.movers.can_send())))

    @precondition(lambda self: self.world.movers.can_fail())
    @rule(data=st.data())
    def rank_fails(self, data: st.DataObject) -> None:
        self.world.movers.fail(*data.draw(st.sampled_from(self.world.movers.can_fail())))

    @precondition(lambda self: self.world.movers.can_quiet())
    @rule(data=st.data())
    def rank_becomes_quiet(self, data: st.DataObject) -> None:
        movers = self.world.movers
        movers.become_quiet(*data.draw(st.sampled_from(movers.can_quiet())))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        export = self._some(data)
        self.world.say(export, abort=prefill_pb2.Abort(generation=export.generation))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.world.handoff.lost(self._some(data))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        export = self._some(data)
        if export.phase is Phase.COMMITTED:
            self.world.say(export, received=prefill_pb2.Received(generation=1))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def echo(self, data: st.DataObject) -> None:
        self.world.say(self._some(data), heartbeat_echo=prefill_pb2.HeartbeatEcho())

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.wait(seconds)

    @invariant()
    def nothing_is_said_too_early(self) -> None:
        for export, stream, transfer_id in self.calls.values():
            kinds = stream.kinds()
            if "quiesced" in kinds and transfer_id is not None:
                assert self.world.movers.is_quiet(transfer_id)
            if "committed" in kinds:
                assert kinds.index("prefilled") < kinds.index("committed")
                assert len(export.sent) == self.world.movers.n_ranks
            assert stream.is_finished == (export.phase is Phase.ENDED)

    @invariant()
    def memory_is_held_exactly_by_open_requests(self) -> None:
        held = 0
        for export, _stream, _transfer in self.calls.values():
            request = self.world.scheduler.request(export.key)
            assert (request is None) == (export.phase is Phase.ENDED)
            held += 0 if request is None else len(request.pages)
        assert self.world.scheduler.page_counts().held == held

    def teardown(self) -> None:
        """Ranks that answer and time that passes end everything."""
        world = self.world
        for _ in range(200):
            self.plan()
            if self.plans:
                self.acknowledge()
            for pair in world.movers.can_send():
                world.movers.send(*pair)
            for pair in world.movers.can_quiet():
                world.movers.become_quiet(*pair)
            if world.handoff.n_open == 0:
                break
            world.wait(1.0)
        assert world.handoff.n_open == 0, "a request never ends"
        assert world.handoff.n_transfers == 0
        assert world.is_at_baseline


AnyOrder.TestCase.settings = settings(
    deadline=None,
    max_examples=50,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyOrder = AnyOrder.TestCase
