"""Requests from admission to complete caches against scripted prefill instances, on a virtual clock.

Every story ends with `settle`: pages, slots and rows are back, nothing is in quarantine. Candidates that fail are in
`test_intake_candidates.py`, clocks, fences and lost ranks in `test_intake_faults.py`.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from decode_svc.caller import Admitted, Failed, Finished
from decode_svc.intake.source import Proof
from k3.errors import (
    DeadlineExceeded,
    QueueFull,
)
from k3.types import FinishReason
from k3.v1 import plan_pb2, prefill_pb2
from tests.sim.decode_world import FIRST, Call, World, good, until
from tests.sim.intake_story import failures, now, play, tokens

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
