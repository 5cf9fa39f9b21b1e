"""The handoff against scripted movers and a virtual clock: how requests are sent, received, aborted and proven quiet.

Faults are in `test_handoff_faults.py`, any order of events in `test_handoff_any_order.py`.
"""

from __future__ import annotations

from k3.errors import (
    RequestAborted,
    RequestRejected,
)
from k3.v1 import prefill_pb2
from prefill_svc.export import Phase
from tests.sim.handoff_world import DRAINING, QUIESCED, World, copies
from tests.sim.prefill_ranks import (
    acknowledge,
    run_step,
)


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
