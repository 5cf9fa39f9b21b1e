"""The handoff against scripted movers and a virtual clock: stories first, then any order of events.

What must hold: nothing is reused before it is quiet, `Quiesced` and `Committed` are never said too early, every
stream ends once, and with nobody left the pools are where they started.
"""

from __future__ import annotations

import asyncio
from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from k3.config.tree import TransferConfig
from k3.errors import (
    DeadlineExceeded,
    GroupFailed,
    QueueFull,
    ReconnectRequired,
    RequestAborted,
    RequestRejected,
    TransferError,
    Unavailable,
)
from k3.v1 import plan_pb2, prefill_pb2
from prefill_svc.core.scheduler import Plan, Policy, PrefillScheduler
from prefill_svc.export import Export, Phase
from prefill_svc.handoff import Handoff
from prefill_svc.peers import Peers
from tests.sim.prefill_ranks import (
    N_PEER_PAGES,
    Clock,
    Movers,
    P,
    Pairing,
    Stream,
    acknowledge,
    connect,
    connect_request,
    identity,
    run_step,
)

N_PAGES, N_SLOTS = 40, 6
TIMES = TransferConfig(
    heartbeat_s=2.0, self_fence_s=15.0, drain_s=10.0, lease_s=30.0, transfer_deadline_s=30.0
)
QUIESCED = prefill_pb2.QUIESCE_STATE_QUIESCED
DRAINING = prefill_pb2.QUIESCE_STATE_STILL_DRAINING


class World:
    """One prefill instance with two ranks, one connected decode instance `d1`."""

    def __init__(self, *, n_ranks: int = 2, budget: int = 8, inflight: int = 1) -> None:
        self.clock = Clock()
        self.movers = Movers(n_ranks)
        policy = Policy(
            token_budget=budget,
            max_inflight=inflight,
            chunk_align=P,
            max_running=4,
            max_queue=4,
            short_len=budget,
        )
        self.scheduler = PrefillScheduler(policy, n_pages=N_PAGES, n_slots=N_SLOTS, page_tokens=P)
        self.peers = Peers(identity(), Pairing(), n_ranks, self.movers.command, self.clock)
        self.ended: list[Export] = []
        self.handoff = Handoff(
            peers=self.peers,
            prompts=self.scheduler,
            command=self.movers.command,
            clock=self.clock,
            times=TIMES,
            reserve_wait_s=30.0,
            n_ranks=n_ranks,
            page_tokens=P,
            on_end=self.ended.append,
        )
        self.movers.handoff_status = self.handoff.on_status
        asyncio.run(connect(self.peers, self.movers, connect_request("d1")))
        self.n_keys = 0

    def open(self, prompt_len: int) -> tuple[Export, Stream]:
        self.n_keys += 1
        stream = Stream()
        self.scheduler.submit(self.n_keys, prompt_len, self.clock())
        peer = self.peers.find("d1")
        return self.handoff.open(self.n_keys, peer, prompt_len, stream), stream

    def say(self, export: Export, **message: object) -> None:
        self.handoff.receive(export, prefill_pb2.PrefillRequest(**message))  # type: ignore[arg-type]

    def send_destination(self, export: Export, transfer_id: int = 77, **fields: object) -> None:
        destination = prefill_pb2.Destination(
            transfer_id=transfer_id,
            nonce=5,
            generation=1,
            pages=range(-(-export.prompt_len // P)),
            state_slot=1,
            lease_s=30.0,
        )
        for name, value in fields.items():
            if isinstance(value, list):
                destination.ClearField(name)  # type: ignore[arg-type]
                getattr(destination, name).extend(value)
            else:
                setattr(destination, name, value)
        self.say(export, destination=destination)

    def compute(self) -> None:
        while run_step(self.scheduler, self.handoff):
            pass

    def send_all(self, transfer_id: int = 77) -> None:
        for rank in range(self.movers.n_ranks):
            self.movers.send(rank, transfer_id)

    def quiet_all(self, transfer_id: int = 77) -> None:
        for rank in range(self.movers.n_ranks):
            self.movers.become_quiet(rank, transfer_id)

    def wait(self, seconds: float) -> None:
        """Let time pass in small steps, as the driver does."""
        until = self.clock.now_s + seconds
        while self.clock.now_s < until:
            self.clock.now_s = min(until, self.clock.now_s + 0.25)
            self.handoff.tick()

    def quiesce(
        self, *transfer_ids: int, instance: str = "prefill-1", caller: str = "d1"
    ) -> list[int]:
        request = prefill_pb2.QuiesceRequest(
            instance_id=caller, prefill_instance_id=instance, transfer_ids=transfer_ids
        )
        return list(self.handoff.quiesce(request))

    @property
    def is_at_baseline(self) -> bool:
        pages, slots = self.scheduler.page_counts(), self.scheduler.slot_counts()
        return pages.free == N_PAGES and slots.free == N_SLOTS and self.scheduler.n_open == 0


def copies(world: World, rank: int) -> list[plan_pb2.CopyPages]:
    return [c.copy for r, c in world.movers.commands if r == rank and c.HasField("copy")]


def test_pages_go_out_as_plans_complete_them() -> None:
    world = World(budget=8)
    export, _stream = world.open(19)
    world.send_destination(export)
    world.compute()
    for rank in (0, 1):
        sent = copies(world, rank)
        assert [(c.first_page, len(c.pages), c.after_step, c.last, c.tokens) for c in sent] == [
            (0, 2, 1, False, 8),
            (2, 2, 2, False, 16),
            (4, 1, 3, True, 19),
        ]
        assert sent[-1].state_slot == export.slot


def test_a_chunk_that_completes_no_page_sends_nothing() -> None:
    world = World(budget=3)
    export, _stream = world.open(7)
    world.send_destination(export)
    world.compute()
    assert [(c.first_page, len(c.pages), c.last) for c in copies(world, 0)] == [
        (0, 1, False),
        (1, 1, True),
    ]


def test_a_late_destination_gets_everything_computed_so_far_at_once() -> None:
    world = World(budget=8)
    export, _stream = world.open(19)
    world.compute()
    assert not copies(world, 0), "nothing is posted before the destination is known"
    world.send_destination(export)
    assert [(c.first_page, len(c.pages), c.last) for c in copies(world, 1)] == [(0, 5, True)]


def test_committed_needs_every_rank_and_the_first_token() -> None:
    world = World(inflight=2)
    export, stream = world.open(5)
    world.send_destination(export)
    plan = world.scheduler.plan(0.0)
    assert plan is not None
    world.handoff.planned(plan.step_id, plan.chunks)
    world.send_all()
    assert stream.kinds() == [], "the bytes were faster than the acknowledgement"
    acknowledge(world.scheduler, world.handoff, plan)
    assert stream.kinds() == ["prefilled", "committed"]
    committed = stream.responses[-1].committed
    assert (committed.transfer_id, committed.nonce, committed.generation) == (77, 5, 1)
    assert [(t.sender, t.records) for t in committed.totals] == [(0, 1), (1, 1)]
    assert committed.bytes == 40
    assert not committed.draft_valid


def test_received_ends_the_request_and_frees_its_memory() -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export)
    world.compute()
    world.send_all()
    assert world.scheduler.pinned_pages == 2
    world.say(export, received=prefill_pb2.Received(generation=1))
    assert stream.is_finished
    assert stream.error is None
    assert world.is_at_baseline
    assert world.ended == [export]


def test_received_before_committed_is_a_fault_of_the_caller() -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export)
    world.say(export, received=prefill_pb2.Received(generation=1))
    world.quiet_all()
    assert isinstance(stream.error, RequestRejected)


def test_an_abort_is_answered_only_when_every_rank_is_quiet() -> None:
    world = World()
    export, stream = world.open(19)
    world.send_destination(export)
    run_step(world.scheduler, world.handoff)
    world.say(export, abort=prefill_pb2.Abort(generation=1))
    world.movers.become_quiet(0, 77)
    assert stream.kinds() == []
    assert world.scheduler.page_counts().held == 5, "source pages stay while a write may read them"
    world.movers.become_quiet(1, 77)
    assert stream.responses[-1].quiesced.generation == 1
    assert stream.is_finished
    assert stream.error is None
    assert world.is_at_baseline
    assert not run_step(world.scheduler, world.handoff)


def test_an_abort_without_a_destination_is_quiet_at_once() -> None:
    world = World()
    export, stream = world.open(19)
    run_step(world.scheduler, world.handoff)
    world.say(export, abort=prefill_pb2.Abort())
    assert stream.kinds() == ["quiesced"]
    assert world.is_at_baseline


def test_an_abort_after_committed_is_quiet_when_the_movers_say_so() -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export)
    world.compute()
    world.send_all()
    world.say(export, abort=prefill_pb2.Abort(generation=1))
    assert stream.kinds()[-1] == "committed"
    world.quiet_all()
    assert stream.kinds()[-1] == "quiesced"
    assert world.is_at_baseline


def test_a_lost_stream_is_drained_and_quiesce_tells_how_far_it_is() -> None:
    world = World()
    export, _stream = world.open(5)
    world.send_destination(export)
    world.compute()
    world.handoff.lost(export)
    world.handoff.lost(export)
    assert world.quiesce(77) == [DRAINING]
    world.quiet_all()
    assert world.quiesce(77) == [QUIESCED]
    assert world.is_at_baseline


def test_quiesce_aborts_a_transfer_whose_stream_is_not_known_to_be_lost() -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export)
    assert world.quiesce(77) == [DRAINING]
    world.quiet_all()
    assert isinstance(stream.error, RequestAborted)


def test_an_unknown_transfer_is_quiet_and_its_destination_is_refused_afterwards() -> None:
    world = World()
    export, stream = world.open(5)
    assert world.quiesce(77) == [QUIESCED]
    world.send_destination(export)
    assert isinstance(stream.error, RequestAborted)
    assert not copies(world, 0)


def test_a_tombstone_lasts_one_lease() -> None:
    world = World()
    world.quiesce(77)
    world.wait(31.0)
    export, stream = world.open(5)
    world.send_destination(export)
    assert not stream.is_finished


def test_an_unknown_transfer_of_another_incarnation_is_not_vouched_for() -> None:
    world = World()
    states = world.quiesce(77, instance="prefill-0")
    assert states == [prefill_pb2.QUIESCE_STATE_UNSPECIFIED]


def test_nobody_can_end_the_transfer_of_another_instance() -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export)
    assert world.quiesce(77, caller="d2") == [prefill_pb2.QUIESCE_STATE_UNSPECIFIED]
    assert not stream.is_finished
    assert export.phase is Phase.OPEN


def test_a_second_destination_is_refused() -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export, 77)
    world.send_destination(export, 78)
    world.quiet_all(77)
    assert isinstance(stream.error, RequestRejected)


def test_two_requests_cannot_use_one_transfer_id() -> None:
    world = World()
    first, first_stream = world.open(5)
    second, second_stream = world.open(5)
    world.send_destination(first, 77)
    world.send_destination(second, 77)
    assert isinstance(second_stream.error, RequestRejected)
    assert not first_stream.is_finished


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"pages": [0, 0]}, "destination.pages"),
        ({"pages": [0]}, "destination.pages"),
        ({"pages": [0, N_PEER_PAGES]}, "destination.pages"),
        ({"state_slot": 8}, "destination.state_slot"),
        ({"generation": 0}, "destination.generation"),
        ({"have_pages": 1}, "destination.have_pages"),
        ({"lease_s": 25.0}, "destination.lease_s"),
    ],
)
def test_a_destination_outside_the_announced_pools_is_rejected(
    fields: dict[str, object], param: str
) -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export, **fields)
    assert isinstance(stream.error, RequestRejected)
    assert stream.error.param == param
    assert world.is_at_baseline


def test_a_failed_rank_ends_the_transfer_on_all_ranks() -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export)
    world.compute()
    world.movers.fail(0, 77)
    assert not stream.is_finished, "not before every handle has ended"
    world.quiet_all()
    assert isinstance(stream.error, TransferError)
    assert stream.kinds()[-1] == "quiesced"
    assert world.peers.find("d1") is not None


def test_a_lost_peer_fails_all_its_requests_and_must_connect_again() -> None:
    world = World()
    first, first_stream = world.open(5)
    _second, second_stream = world.open(5)
    world.send_destination(first)
    world.compute()
    world.movers.fail(1, 77, peer_lost=True)
    assert isinstance(second_stream.error, Unavailable)
    with pytest.raises(ReconnectRequired):
        world.peers.find("d1")
    assert not any(c.HasField("drop_peer") for _, c in world.movers.commands)
    world.quiet_all()
    assert isinstance(first_stream.error, Unavailable)
    dropped = [rank for rank, c in world.movers.commands if c.HasField("drop_peer")]
    assert dropped == [0, 1], "forgotten once nothing runs to it"


def test_a_rank_with_a_new_agent_has_lost_every_peer() -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export)
    ready = plan_pb2.TransferStatus(ready=plan_pb2.MoverReady())
    world.handoff.on_status(0, ready)
    assert not stream.is_finished
    world.movers.become_quiet(1, 77)
    assert isinstance(stream.error, Unavailable)
    with pytest.raises(ReconnectRequired):
        world.peers.find("d1")


def test_without_a_destination_memory_is_kept_for_reserve_wait() -> None:
    world = World()
    _export, stream = world.open(5)
    world.wait(100.0)
    assert not stream.is_finished, "the clock starts at the first token"
    world.compute()
    world.wait(29.5)
    assert not stream.is_finished
    world.wait(1.0)
    assert isinstance(stream.error, QueueFull)
    assert stream.error.code == "reserve_wait"
    assert world.is_at_baseline


def test_heartbeats_grow_by_one_once_a_destination_is_known() -> None:
    world = World(budget=8)
    export, stream = world.open(19)
    world.wait(5.0)
    assert stream.kinds() == []
    world.send_destination(export)
    run_step(world.scheduler, world.handoff)
    progress = plan_pb2.TransferProgress(transfer_id=77, bytes_done=30)
    world.handoff.on_status(1, plan_pb2.TransferStatus(progress=progress))
    world.wait(5.0)
    beats = [r.progress for r in stream.responses]
    assert [(b.seq, b.computed_tokens, b.bytes_done) for b in beats] == [(1, 8, 30), (2, 8, 30)]


def test_without_an_echo_prefill_fences_itself() -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export)
    world.wait(14.0)
    world.say(export, heartbeat_echo=prefill_pb2.HeartbeatEcho(seq=7))
    world.wait(14.0)
    assert export.phase is Phase.OPEN
    world.wait(2.0)
    assert export.phase is Phase.DRAINING
    world.quiet_all()
    assert isinstance(stream.error, Unavailable)
    assert stream.error.code == "self_fence"


def test_a_tail_that_takes_too_long_is_given_up() -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export)
    world.compute()
    for _ in range(31):
        world.say(export, heartbeat_echo=prefill_pb2.HeartbeatEcho())
        world.wait(1.0)
    world.quiet_all()
    assert isinstance(stream.error, TransferError)
    assert stream.error.code == "transfer_stalled"


def test_a_rank_that_cannot_prove_quiet_in_time_leaves_the_destination_in_doubt() -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export)
    world.compute()
    world.say(export, abort=prefill_pb2.Abort(generation=1))
    world.movers.become_quiet(0, 77)
    world.wait(11.0)
    assert isinstance(stream.error, DeadlineExceeded)
    assert "quiesced" not in stream.kinds()
    assert world.is_at_baseline
    assert world.quiesce(77) == [DRAINING]
    world.movers.become_quiet(1, 77)
    assert world.quiesce(77) == [QUIESCED]


def test_committed_that_is_never_answered_ends_after_one_lease() -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export)
    world.compute()
    world.send_all()
    for _ in range(31):
        world.say(export, heartbeat_echo=prefill_pb2.HeartbeatEcho())
        world.wait(1.0)
    world.quiet_all()
    assert isinstance(stream.error, DeadlineExceeded)
    assert world.is_at_baseline


def test_missing_records_are_asked_of_their_senders() -> None:
    world = World()
    export, stream = world.open(5)
    world.send_destination(export)
    world.compute()
    world.send_all()
    missing = prefill_pb2.MissingRecords(sender=1, receiver=0, seqs=[0])
    world.say(export, resend_records=prefill_pb2.ResendRecords(missing=[missing]))
    resent = [(r, c.resend) for r, c in world.movers.commands if c.HasField("resend")]
    assert [(rank, list(resend.missing)) for rank, resend in resent] == [(1, [missing])]
    beyond = prefill_pb2.MissingRecords(sender=2, receiver=0)
    world.say(export, resend_records=prefill_pb2.ResendRecords(missing=[beyond]))
    world.quiet_all()
    assert isinstance(stream.error, RequestRejected)


def test_the_loss_of_the_group_ends_everything_at_once() -> None:
    world = World()
    first, first_stream = world.open(5)
    _second, second_stream = world.open(40)
    world.send_destination(first)
    world.compute()
    world.handoff.fail_all(GroupFailed("rank 1 died"))
    assert isinstance(first_stream.error, GroupFailed)
    assert isinstance(second_stream.error, GroupFailed)
    assert "quiesced" not in first_stream.kinds()
    assert world.handoff.n_open == 0


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
