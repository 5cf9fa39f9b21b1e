"""Silence, stalls, missing records, proofs that never come and ranks that are lost, on a virtual clock.

Every story ends with `settle`: pages, slots and rows are back, nothing is in quarantine.
"""

from __future__ import annotations

import asyncio

import pytest

from decode_svc.caller import Failed
from decode_svc.intake.attempt import INBOX_LIMIT
from decode_svc.intake.source import Proof
from k3.errors import (
    TransferError,
)
from k3.v1 import plan_pb2, prefill_pb2
from tests.sim.decode_world import FIRST, Call, World, good, until
from tests.sim.intake_story import failures, now, play, tokens

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
        assert call.is_cancelled, "nobody listens, but the call is open"
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
