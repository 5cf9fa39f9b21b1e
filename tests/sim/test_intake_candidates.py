"""Prefill instances that refuse, fail, are lost or do not know us: what a request does next, on a virtual clock.

Every story ends with `settle`: pages, slots and rows are back, nothing is in quarantine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from decode_svc.caller import Failed
from decode_svc.intake.source import PrefillLost, Proof
from k3.errors import (
    GroupFailed,
    QueueFull,
    ReconnectRequired,
    RequestRejected,
    Unavailable,
)
from tests.sim.decode_world import Call, World, good
from tests.sim.intake_story import failures, now, play, tokens


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


def process_dies(call: Call) -> None:
    call.die()


def ranks_die(call: Call) -> None:
    call.end(GroupFailed("rank 1 of prefill is lost"))


@pytest.mark.parametrize(
    "ends", [(process_dies, process_dies), (ranks_die, process_dies), (ranks_die, ranks_die)]
)
def test_two_lost_instances_end_the_request_without_a_third(
    ends: tuple[Callable[[Call], None], ...],
) -> None:
    """The process is gone, or its front says that the ranks are."""
    waiting = list(ends)

    async def die(call: Call) -> None:
        await call.accept()
        waiting.pop(0)(call)

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


def test_an_instance_that_dies_before_it_takes_the_request_does_not_count() -> None:
    async def die(call: Call) -> None:
        await call.wait_for("start")
        ranks_die(call)

    async def story(world: World) -> None:
        world.scripts |= {address: [die] for address in ("a:1", "b:1")}
        assert len(tokens(await world.drain(world.generate("a:1", "b:1", "c:1")))) == 4
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
