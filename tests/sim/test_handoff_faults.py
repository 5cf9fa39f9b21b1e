"""The handoff when peers, ranks, clocks or callers fail: scripted movers, a virtual clock."""

from __future__ import annotations

import pytest

from k3.errors import (
    DeadlineExceeded,
    GroupFailed,
    QueueFull,
    ReconnectRequired,
    RequestRejected,
    TransferError,
    Unavailable,
)
from k3.v1 import plan_pb2, prefill_pb2
from prefill_svc.export import Phase
from tests.sim.handoff_world import DRAINING, QUIESCED, World
from tests.sim.prefill_ranks import (
    N_PEER_PAGES,
    run_step,
)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"pages": [0, 0]}, "destination.pages"),
        ({"pages": [0]}, "destination.pages"),
        ({"pages": [0, N_PEER_PAGES]}, "destination.pages"),
        ({"rank_pages": [prefill_pb2.PageList(rank=99, pages=[0, 1])]}, "destination.rank_pages"),
        (
            {"rank_pages": [prefill_pb2.PageList(rank=0, pages=[0, 1])] * 2},
            "destination.rank_pages",
        ),
        ({"state_slot": 8}, "destination.state_slot"),
        ({"draft_slot": 8}, "destination.draft_slot"),
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
