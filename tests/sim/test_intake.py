"""Requests from admission to complete caches against scripted prefill instances, on a virtual clock.

Every story ends with `settle`: pages, slots and rows are back, nothing is in quarantine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from decode_svc.caller import Admitted, CandidateFailed, Event, Failed, Finished, Tokens
from decode_svc.intake.attempt import INBOX_LIMIT
from decode_svc.intake.source import PrefillLost, Proof
from k3.errors import (
    DeadlineExceeded,
    GroupFailed,
    QueueFull,
    ReconnectRequired,
    RequestRejected,
    TransferError,
    Unavailable,
)
from k3.types import FinishReason
from k3.v1 import plan_pb2, prefill_pb2
from tests.sim.decode_world import FIRST, Call, World, good, ids, until
from tests.sim.virtual_time import run

Story = Callable[[World], Coroutine[Any, Any, None]]


def now() -> float:
    return asyncio.get_running_loop().time()


def play(story: Story, **sizes: int) -> World:
    async def whole() -> World:
        world = World(**sizes)
        await world.play(story)
        return world

    return run(whole())


def tokens(events: list[Event]) -> list[int]:
    return [i for event in events if isinstance(event, Tokens) for i in ids(event.tokens)]


def failures(events: list[Event]) -> list[tuple[str, str]]:
    return [(e.instance_id, e.reason) for e in events if isinstance(e, CandidateFailed)]


# ------------------------------------------------------------------ the regular way


def test_a_request_is_filled_and_runs_to_its_end() -> None:
    async def story(world: World) -> None:
        events = await world.drain(world.generate(m=4))
        assert isinstance(events[0], Admitted)
        assert tokens(events) == [FIRST, 101, 102, 103]
        end = events[-1]
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.LENGTH
        assert end.usage == (6, 4, 3)
        assert end.prefill_instance_id == "prefill-at-a:1"
        await world.settle()
        assert world.calls[0].is_cancelled, "the stream was not finished with"
        assert [m.WhichOneof("message") for m in world.calls[0].heard] == [
            "start",
            "destination",
            "received",
        ]

    play(story)


def test_ranks_expect_a_transfer_before_prefill_learns_where_to_write() -> None:
    order: list[str] = []

    async def story(world: World) -> None:
        command = world.ranks.command

        async def spy(rank: int, sent: plan_pb2.TransferCommand) -> None:
            order.append(sent.WhichOneof("command") or "")
            await command(rank, sent)

        world.life.intake._command = spy

        async def script(call: Call) -> None:
            destination = await call.accept()
            order.append("destination")
            expect = world.ranks.commands[0].expect
            assert (expect.transfer_id, expect.nonce) == (
                destination.transfer_id,
                destination.nonce,
            )
            assert list(expect.senders) == [0]
            await call.finish(destination)

        world.scripts["a:1"] = [script]
        await world.drain(world.generate())
        await world.settle()

    play(story)
    assert order == ["expect", "destination", "abort"]


def test_the_destination_names_the_pages_of_the_prompt_only() -> None:
    async def story(world: World) -> None:
        caller = world.generate(n=9, m=20)
        await world.drain(caller)
        destination = world.calls[0].heard[1].destination
        assert len(destination.pages) == 3  # ceil(9 / 4); the reservation holds more
        assert destination.generation == 1
        assert destination.state_slot > 0
        await world.settle()

    play(story)


def test_heartbeats_are_echoed() -> None:
    async def script(call: Call) -> None:
        destination = await call.accept()
        for seq in (1, 2, 5):
            call.say(progress=prefill_pb2.Progress(seq=seq, computed_tokens=2))
            assert (await call.wait_for("heartbeat_echo")).seq == seq
        await call.finish(destination)

    async def story(world: World) -> None:
        world.scripts["a:1"] = [script]
        assert len(tokens(await world.drain(world.generate()))) == 4
        await world.settle()

    play(story)


def test_requests_of_one_pair_share_one_connect() -> None:
    async def story(world: World) -> None:
        callers = [world.generate() for _ in range(3)]
        await asyncio.gather(*(world.drain(g) for g in callers))
        assert world.connects == ["a:1"]
        await world.settle()

    play(story)


def test_more_requests_than_rows_queue_and_are_served_in_order() -> None:
    async def story(world: World) -> None:
        callers = [world.generate(m=5) for _ in range(7)]
        await asyncio.gather(*(world.drain(g) for g in callers))
        served = [call.heard[0].start.request_id for call in world.calls]
        assert served == [f"r{i}" for i in range(1, 8)]
        await world.settle()

    play(story, rows=2, pages=6)


# ------------------------------------------------------------------ the first token


def test_a_first_token_that_ends_the_request_never_gets_a_row() -> None:
    async def script(call: Call) -> None:
        await call.accept()
        call.prefilled(FIRST)
        abort = await call.wait_for("abort")
        assert abort.reason == prefill_pb2.ABORT_REASON_STOPPED
        await asyncio.sleep(2.0)  # what was posted drains
        call.say(quiesced=prefill_pb2.Quiesced(generation=1))
        call.end()

    async def story(world: World) -> None:
        world.scripts["a:1"] = [script]
        events = await world.drain(world.generate(end_ids=(FIRST,)))
        assert tokens(events) == [FIRST]
        assert isinstance(events[-1], Finished)
        assert now() < 1.0, "the caller waited for the drain"
        assert world.life.load().pages_quarantined > 0
        await world.settle()
        assert 2.0 <= now() < 2.5
        assert world.ranks.plans == []

    play(story)


# ------------------------------------------------------------------ candidates


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueFull("full"), "resource_exhausted"),
        (Unavailable("draining", code="draining"), "unavailable"),
    ],
)
def test_a_refusal_leads_to_the_next_candidate_with_the_same_reservation(
    error: QueueFull | Unavailable, reason: str
) -> None:
    async def refuse(call: Call) -> None:
        await call.wait_for("destination")
        call.end(error)

    async def story(world: World) -> None:
        world.scripts["a:1"] = [refuse]
        events = await world.drain(world.generate("a:1", "b:1"))
        assert failures(events) == [("prefill-a:1", reason)]
        assert len(tokens(events)) == 4
        first, second = (call.heard[1].destination for call in world.calls)
        assert list(first.pages) == list(second.pages)
        assert (first.generation, second.generation) == (1, 2)
        assert first.transfer_id != second.transfer_id
        await world.settle()
        assert world.quiesced == [], "a refusal is a statement of quiet"

    play(story)


def test_a_candidate_lost_after_its_destination_leaves_its_pages_in_quarantine() -> None:
    async def die(call: Call) -> None:
        await call.accept()
        call.die()

    async def story(world: World) -> None:
        world.scripts["a:1"] = [die]
        world.proof = lambda _address: Proof.DEAD
        events = await world.drain(world.generate("a:1", "b:1"))
        assert failures(events) == [("prefill-a:1", "instance_failed")]
        first, second = (call.heard[1].destination for call in world.calls)
        assert not set(first.pages) & set(second.pages)
        assert first.state_slot != second.state_slot
        assert second.generation == 2
        assert world.life.load().pages_quarantined > 0
        await world.settle()
        assert now() >= 5.0, "a dead sender's writes were not given time to end"

    play(story)


def test_without_room_for_a_second_reservation_the_request_waits_for_the_proof() -> None:
    answers = iter([Proof.DRAINING] * 4 + [Proof.QUIET])

    async def die(call: Call) -> None:
        await call.accept()
        call.die()

    async def story(world: World) -> None:
        world.scripts["a:1"] = [die]
        world.proof = lambda _address: next(answers)
        first = world.generate("a:1", "b:1", n=20, m=4)  # 6 of 8 pages
        second = world.generate("b:1", n=20, m=4)
        both = await asyncio.gather(world.drain(first), world.drain(second))
        assert [len(tokens(events)) for events in both] == [4, 4]
        assert [call.address for call in world.calls] == ["a:1", "b:1", "b:1"]
        assert now() >= 2.0  # four answers "still draining", half a second apart
        await world.settle()

    play(story, pages=8)


def test_an_unreachable_sender_keeps_its_pages_until_it_can_be_asked() -> None:
    heal_at = 20.0

    def proof(_address: str) -> Proof | PrefillLost:
        if now() < heal_at:
            return PrefillLost("no route to host")
        return Proof.QUIET

    async def die(call: Call) -> None:
        await call.accept()
        call.die()

    async def story(world: World) -> None:
        world.scripts["a:1"] = [die]
        world.proof = proof
        await world.drain(world.generate("a:1", "b:1"))
        await asyncio.sleep(heal_at - 1.0 - now())
        assert world.life.load().pages_quarantined > 0
        await world.settle()
        assert now() >= heal_at

    play(story)


def test_a_refused_connection_proves_the_process_dead_after_five_seconds() -> None:
    async def die(call: Call) -> None:
        await call.accept()
        call.die()

    async def story(world: World) -> None:
        world.scripts["a:1"] = [die]
        world.proof = lambda _address: PrefillLost("connection refused", code="refused")
        await world.drain(world.generate("a:1", "b:1"))
        await world.settle()
        assert 5.0 <= now() < 6.0

    play(story)


def test_two_lost_instances_end_the_request_without_a_third() -> None:
    async def die(call: Call) -> None:
        await call.accept()
        call.die()

    async def story(world: World) -> None:
        world.scripts = {address: [die] for address in ("a:1", "b:1", "c:1")}
        events = await world.drain(world.generate("a:1", "b:1", "c:1"))
        end = events[-1]
        assert isinstance(end, Failed)
        assert isinstance(end.error, GroupFailed)
        assert end.error.code == "poison_request"
        assert [call.address for call in world.calls] == ["a:1", "b:1"]
        await world.settle()

    play(story)


def test_a_rejected_request_is_not_tried_elsewhere() -> None:
    async def reject(call: Call) -> None:
        await call.wait_for("start")
        call.end(RequestRejected("bad prompt", param="token_ids"))

    async def story(world: World) -> None:
        world.scripts["a:1"] = [reject]
        events = await world.drain(world.generate("a:1", "b:1"))
        end = events[-1]
        assert isinstance(end, Failed)
        assert isinstance(end.error, RequestRejected)
        assert end.error.param == "token_ids"
        assert len(world.calls) == 1
        await world.settle()

    play(story)


def test_when_every_candidate_is_full_the_caller_hears_full() -> None:
    async def refuse(call: Call) -> None:
        await call.wait_for("start")
        call.end(QueueFull("full", retry_after_s=3.0))

    async def story(world: World) -> None:
        world.scripts = {address: [refuse] for address in ("a:1", "b:1")}
        events = await world.drain(world.generate("a:1", "b:1"))
        end = events[-1]
        assert isinstance(end, Failed)
        assert isinstance(end.error, QueueFull)
        assert len(failures(events)) == 2
        await world.settle()

    play(story)


def test_an_address_outside_the_allow_list_is_never_dialled() -> None:
    async def story(world: World) -> None:
        events = await world.drain(world.generate("evil:1", "b:1"))
        assert failures(events) == [("prefill-evil:1", "not_allowed")]
        assert world.connects == ["b:1"]
        assert len(tokens(events)) == 4
        await world.settle()

    play(story)


def test_an_unknown_peer_is_introduced_again_and_asked_again() -> None:
    async def unknown(call: Call) -> None:
        await call.wait_for("start")
        call.end(ReconnectRequired("who are you"))

    async def story(world: World) -> None:
        world.scripts["a:1"] = [unknown, good]
        events = await world.drain(world.generate("a:1", "b:1"))
        assert failures(events) == []
        assert world.connects == ["a:1", "a:1"]
        assert len(tokens(events)) == 4
        await world.settle()

    play(story)


def test_a_peer_that_never_knows_us_is_given_up() -> None:
    async def unknown(call: Call) -> None:
        await call.wait_for("start")
        call.end(ReconnectRequired("who are you"))

    async def story(world: World) -> None:
        world.scripts["a:1"] = [unknown]
        events = await world.drain(world.generate("a:1", "b:1"))
        assert failures(events) == [("prefill-a:1", "reconnect_required")]
        assert len(world.connects) == 4
        await world.settle()

    play(story)


# ------------------------------------------------------------------ clocks


def test_silence_for_a_lease_fails_the_candidate() -> None:
    async def silent(call: Call) -> None:
        await call.accept()
        await asyncio.sleep(3600)

    async def story(world: World) -> None:
        world.scripts["a:1"] = [silent]
        events = await world.drain(world.generate("a:1", "b:1"))
        assert failures(events) == [("prefill-a:1", "deadline")]
        assert 30.0 <= now() < 31.0
        await world.settle()
        assert world.quiesced, "the stream gave no proof, so it must have been asked for"
        assert 40.0 <= now() < 41.0  # drain_s for Quiesced on the stream, then Quiesce

    play(story)


def test_bytes_that_stop_growing_fail_the_candidate() -> None:
    async def stall(call: Call) -> None:
        await call.accept()
        seq = 0
        while call.heard[-1].WhichOneof("message") != "abort":
            seq += 1
            call.say(progress=prefill_pb2.Progress(seq=seq, computed_tokens=6, bytes_done=100))
            await asyncio.sleep(2.0)
        call.say(quiesced=prefill_pb2.Quiesced(generation=1))
        call.end(TransferError("given up"))

    async def story(world: World) -> None:
        world.scripts["a:1"] = [stall]
        events = await world.drain(world.generate("a:1", "b:1"))
        assert failures(events) == [("prefill-a:1", "transfer_stalled")]
        assert 10.0 <= now() < 11.0
        await world.settle()
        assert world.quiesced == []

    play(story)


def test_a_slow_prompt_is_not_a_stall() -> None:
    async def slow(call: Call) -> None:
        destination = await call.accept()
        for seq in range(1, 40):
            call.say(progress=prefill_pb2.Progress(seq=seq, computed_tokens=1, bytes_done=0))
            await asyncio.sleep(2.0)
        await call.finish(destination)

    async def story(world: World) -> None:
        world.scripts["a:1"] = [slow]
        assert len(tokens(await world.drain(world.generate()))) == 4
        await world.settle()

    play(story)


def test_a_transfer_that_never_ends_fails_after_the_first_token() -> None:
    async def never(call: Call) -> None:
        await call.accept()
        call.prefilled()
        seq = 0
        while call.heard[-1].WhichOneof("message") != "abort":
            seq += 1
            call.say(progress=prefill_pb2.Progress(seq=seq, computed_tokens=6, bytes_done=seq))
            await asyncio.sleep(2.0)
        call.say(quiesced=prefill_pb2.Quiesced(generation=1))
        call.end()

    async def story(world: World) -> None:
        world.scripts["a:1"] = [never]
        events = await world.drain(world.generate("a:1", "b:1"))
        assert tokens(events) == [FIRST]
        end = events[-1]
        assert isinstance(end, Failed)
        assert isinstance(end.error, TransferError)
        assert 30.0 <= now() < 31.0
        assert len(world.calls) == 1, "the first token is out: no other candidate"
        await world.settle()

    play(story)


def test_missing_records_are_asked_for_by_name() -> None:
    async def script(call: Call) -> None:
        destination = await call.accept()
        call.prefilled()
        call.committed(destination)
        missing = plan_pb2.TransferMissing(
            transfer_id=destination.transfer_id,
            missing=[prefill_pb2.MissingRecords(sender=0, receiver=0, seqs=[2, 3])],
        )
        call.world.ranks.tell(plan_pb2.TransferStatus(missing=missing))
        resend = await call.wait_for("resend_records")
        assert now() == pytest.approx(5.0, abs=0.1)
        assert [(m.sender, m.receiver, list(m.seqs)) for m in resend.missing] == [(0, 0, [2, 3])]
        call.world.ranks.arrive(destination.transfer_id)
        await call.wait_for("received")
        call.end()

    async def story(world: World) -> None:
        world.scripts["a:1"] = [script]
        assert len(tokens(await world.drain(world.generate()))) == 4
        await world.settle()

    play(story)


def test_a_foreign_commit_does_not_complete_a_transfer() -> None:
    async def script(call: Call) -> None:
        destination = await call.accept()
        call.prefilled()
        call.world.ranks.arrive(destination.transfer_id)
        call.committed(destination, nonce=destination.nonce ^ 1)
        call.committed(destination, generation=7)
        await asyncio.sleep(1.0)
        assert call.world.ranks.plans == []
        call.committed(destination)
        await call.wait_for("received")
        call.end()

    async def story(world: World) -> None:
        world.scripts["a:1"] = [script]
        assert len(tokens(await world.drain(world.generate()))) == 4
        await world.settle()

    play(story)


# ------------------------------------------------------------------ early prefill


def test_a_waiting_request_is_computed_early_and_its_token_held_back() -> None:
    at: dict[str, float] = {}

    async def early(call: Call) -> None:
        await call.wait_for("start")
        call.say(accepted=prefill_pb2.Accepted())
        call.prefilled(77)
        at["prefilled"] = now()
        destination = await call.wait_for("destination")
        at["destination"] = now()
        call.committed(destination)
        call.world.ranks.arrive(destination.transfer_id)
        await call.wait_for("received")
        call.end()

    async def story(world: World) -> None:
        world.scripts["b:1"] = [early]
        first = world.generate("a:1", n=20, m=20)
        second = world.generate("b:1", n=20, m=4)
        events = await asyncio.gather(world.drain(first), world.drain(second))
        assert tokens(events[1]) == [77, 101, 102, 103]
        assert isinstance(events[1][0], Admitted), "a token came before the admission"
        assert at["prefilled"] < 0.1 < at["destination"]
        await world.settle()

    play(story, pages=10, early=2)


def test_a_prefill_that_tires_of_waiting_is_asked_again_once_there_is_room() -> None:
    async def tired(call: Call) -> None:
        await call.wait_for("start")
        call.say(accepted=prefill_pb2.Accepted())
        call.prefilled()
        await asyncio.sleep(0.05)
        call.end(QueueFull("no destination", code="reserve_wait"))

    async def story(world: World) -> None:
        world.scripts["b:1"] = [tired, good]
        first = world.generate("a:1", n=20, m=20)
        second = world.generate("b:1", n=20, m=4)
        events = await asyncio.gather(world.drain(first), world.drain(second))
        assert failures(events[1]) == []
        assert len(tokens(events[1])) == 4
        assert [call.address for call in world.calls] == ["a:1", "b:1", "b:1"]
        await world.settle()

    play(story, pages=10, early=2)


# ------------------------------------------------------------------ aborts


@pytest.mark.parametrize("when", ["connecting", "started", "accepted", "prefilled", "running"])
def test_a_caller_that_leaves_leaves_nothing_behind(when: str) -> None:
    async def script(call: Call) -> None:
        await call.wait_for("start")
        if when == "started":
            reached.set()
        else:
            call.say(accepted=prefill_pb2.Accepted())
            destination = await call.wait_for("destination")
            if when == "running":
                await call.finish(destination)
                return
            if when == "prefilled":
                call.prefilled()
            await asyncio.sleep(0.001)
            reached.set()
        abort = await call.wait_for("abort")
        assert abort.reason == prefill_pb2.ABORT_REASON_CLIENT
        call.say(quiesced=prefill_pb2.Quiesced(generation=1))
        call.end()

    reached = asyncio.Event()

    async def story(world: World) -> None:
        world.scripts["a:1"] = [script]
        caller = world.generate(m=30)
        if when == "connecting":
            await asyncio.sleep(0)
        elif when == "running":
            await until(lambda: bool(world.ranks.plans))
        else:
            await reached.wait()
        world.life.close(caller, prefill_pb2.ABORT_REASON_CLIENT)
        await world.settle(limit_s=2.0)

    play(story)


def test_a_queued_request_that_is_aborted_lets_the_next_one_in() -> None:
    async def story(world: World) -> None:
        running = world.generate(n=20, m=10)
        big = world.generate(n=30, m=10)  # 10 pages: blocks the head of the queue
        small = world.generate(n=4, m=2)
        await asyncio.sleep(0.02)
        assert [r.key for r in world.life.scheduler.head(5)] == [2, 3]
        world.life.close(big, prefill_pb2.ABORT_REASON_CLIENT)
        assert len(tokens(await world.drain(small))) == 2
        await world.drain(running)
        await world.settle()

    play(story, pages=10)


# ------------------------------------------------------------------ fence and loss


def test_a_quarantine_that_cannot_be_proven_ends_with_the_hard_fence() -> None:
    async def die(call: Call) -> None:
        await call.accept()
        call.die()

    async def story(world: World) -> None:
        world.scripts["a:1"] = [die]
        world.proof = lambda _address: Proof.DRAINING
        await world.drain(world.generate("a:1", "b:1"))
        await world.settle()
        assert 30.0 <= now() < 32.0
        assert "rebuild" in world.ranks.kinds()
        before = len(world.connects)
        assert len(tokens(await world.drain(world.generate("b:1")))) == 4
        assert world.connects[before:] == ["b:1"], "peers must learn the new agents"
        await world.settle()

    play(story)


def test_a_fence_sends_transfers_that_run_back_to_the_same_candidate() -> None:
    async def hang(call: Call) -> None:
        await call.accept()
        await call.wait_for("abort")
        call.say(quiesced=prefill_pb2.Quiesced(generation=1))
        call.end()

    async def story(world: World) -> None:
        world.scripts["a:1"] = [hang, good]
        caller = world.generate("a:1")
        await until(lambda: world.life.intake.n_transfers == 1)
        await world.life.intake.fence()
        events = await world.drain(caller)
        assert failures(events) == []
        assert len(tokens(events)) == 4
        assert world.connects == ["a:1", "a:1"]
        await world.settle()

    play(story)


def test_a_request_that_connects_during_the_fence_connects_again() -> None:
    async def story(world: World) -> None:
        gate = world.connect_gate = asyncio.Event()
        caller = world.generate("a:1")
        await until(lambda: world.connects == ["a:1"])
        await world.life.intake.fence()
        gate.set()
        assert len(tokens(await world.drain(caller))) == 4
        assert world.connects == ["a:1", "a:1"]
        await world.settle()

    play(story)


def test_a_connection_made_while_agents_are_rebuilt_is_not_used() -> None:
    async def story(world: World) -> None:
        gate = world.connect_gate = asyncio.Event()
        world.ranks.rebuild_s = 1.0
        caller = world.generate("a:1")
        await until(lambda: world.connects == ["a:1"])
        fencing = asyncio.create_task(world.life.intake.fence())
        await asyncio.sleep(0.5)
        gate.set()  # the peer has loaded the old agents
        await fencing
        events = await world.drain(caller)
        assert (len(tokens(events)), failures(events)) == (4, [])
        assert world.connects == ["a:1", "a:1"]
        await world.settle()

    play(story)


def test_slots_that_cannot_be_proven_quiet_end_with_the_hard_fence_too() -> None:
    async def die(call: Call) -> None:
        await call.accept()
        call.die()

    async def story(world: World) -> None:
        world.scripts["a:1"] = [die]
        world.proof = lambda _address: Proof.DRAINING
        await world.drain(world.generate("a:1", "b:1"))
        assert world.life.load().pages_quarantined < 0.1 * world.life.load().pages_total
        await world.settle()
        assert "rebuild" in world.ranks.kinds()

    play(story, pages=60)


def test_a_peer_that_floods_its_stream_fails_its_candidate_only() -> None:
    async def flood(call: Call) -> None:
        await call.wait_for("start")
        for _ in range(2 * INBOX_LIMIT):
            call.say(accepted=prefill_pb2.Accepted())
        call.die()

    async def story(world: World) -> None:
        blocker = world.generate("b:1", m=30)
        world.scripts["a:1"] = [flood]
        events = await world.drain(world.generate("a:1", "b:1"))
        assert failures(events) == [("prefill-a:1", "transfer_failed")]
        assert len(tokens(events)) == 4
        await world.drain(blocker)
        await world.settle()

    play(story, rows=1, early=1)


def test_a_bug_in_a_proof_of_quiet_is_not_swallowed() -> None:
    async def die(call: Call) -> None:
        await call.accept()
        call.die()

    async def story(world: World) -> None:
        world.scripts["a:1"] = [die]

        def broken(_address: str) -> Proof:
            raise AssertionError("a bug")

        world.proof = broken
        await world.drain(world.generate("a:1", "b:1"))
        await until(lambda: world.life.intake.crash is not None)
        assert isinstance(world.life.intake.crash, AssertionError)
        world.life.intake.crash = None  # else the life ends with it, as it should

    play(story)


def test_a_lost_rank_fails_every_open_request_retryable() -> None:
    async def story(world: World) -> None:
        running, filling = world.generate(m=30), world.generate("b:1")
        world.scripts["b:1"] = [lambda call: asyncio.sleep(3600)]
        await until(lambda: bool(world.ranks.plans))
        world.ranks.lose()
        await asyncio.sleep(0.1)
        error = world.ranks.failure
        assert error is not None
        world.life.fail(error)
        for caller in (running, filling):
            events = await world.drain(caller)
            assert events[-1] == Failed(error)
            assert error.retryable

    play(story)


# ------------------------------------------------------------------ everything at once


@pytest.mark.parametrize("seed", range(12))
def test_random_faults_leave_the_pools_at_their_baseline(seed: int) -> None:
    rng = random.Random(seed)

    async def chaos(call: Call) -> None:
        fate = rng.choice(["good", "good", "full", "die", "die late", "stall", "end"])
        await call.wait_for("start")
        await asyncio.sleep(rng.random() / 10)
        if fate == "full":
            call.end(QueueFull("full"))
            return
        call.say(accepted=prefill_pb2.Accepted())
        if fate == "die":
            call.die()
            return
        destination = await call.wait_for("destination")
        match fate:
            case "die late":
                call.prefilled(rng.choice([FIRST, 9]))
                call.die()
            case "stall":
                call.say(progress=prefill_pb2.Progress(seq=1, computed_tokens=99, bytes_done=1))
                await call.wait_for("abort")
                if rng.random() < 0.5:
                    call.say(quiesced=prefill_pb2.Quiesced(generation=destination.generation))
                call.end()
            case "end":
                call.end(DeadlineExceeded("not today"))
            case _:
                await call.finish(destination)

    async def story(world: World) -> None:
        world.scripts = {address: [chaos] for address in ("a:1", "b:1", "c:1")}
        world.proof = lambda _address: rng.choice([Proof.QUIET, Proof.DRAINING, Proof.DEAD])

        async def caller() -> None:
            await asyncio.sleep(rng.random() * 3)
            try:
                caller = world.generate(
                    *rng.sample(["a:1", "b:1", "c:1"], rng.randint(1, 3)),
                    n=rng.randint(1, 20),
                    m=rng.randint(1, 12),
                    end_ids=(9,),
                )
            except QueueFull:
                return
            patience = rng.choice([0.0, 0.05, 0.3, 100.0, 100.0])
            try:
                async with asyncio.timeout(patience):
                    events = await world.drain(caller)
            except TimeoutError:
                return
            end = events[-1]
            assert isinstance(end, Finished | Failed)
            if isinstance(end, Finished):
                assert end.usage.completion_tokens == len(tokens(events))

        await asyncio.gather(*(caller() for _ in range(40)))
        await world.settle()

    play(story, pages=14, early=2)
