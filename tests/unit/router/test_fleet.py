"""The registry over real connections: who is ready, who is lost, who is somebody else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from k3.errors import NotFound, RequestRejected
from k3.rpc.client import ChannelPool
from router.fleet.instance import Instance, InstanceState, Role
from router.fleet.pairing import Need, NoPair, Pair
from router.fleet.policies import make_rules
from router.fleet.registry import Registry
from tests.unit.router.conftest import until
from tests.unit.router.fake_engine import FakeEngine

VOCAB = 4096


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    channels = ChannelPool()
    rules = make_rules("least_load", "least_load", 2, random.Random(0))
    registry = Registry(channels, rules, VOCAB)
    yield registry
    await registry.stop()
    await channels.close()


@pytest.fixture
async def decode() -> AsyncIterator[FakeEngine]:
    engine = await FakeEngine().start()
    yield engine
    await engine.stop()


@pytest.fixture
async def prefill() -> AsyncIterator[FakeEngine]:
    engine = await FakeEngine(role="prefill", instance_id="prefill-a").start()
    yield engine
    await engine.stop()


async def reached(instance: Instance, state: InstanceState) -> None:
    await until(lambda: instance.state is state, f"{state} (is {instance.state})")


async def test_an_instance_that_answers_twice_is_ready(
    registry: Registry, decode: FakeEngine, prefill: FakeEngine
) -> None:
    heard: list[None] = []
    registry.listen(lambda: heard.append(None))
    instance = registry.add(Role.DECODE, decode.address)
    assert instance.state is InstanceState.NEW
    assert registry.choose(Need(5, 5)) is NoPair.NO_DECODE
    await reached(instance, InstanceState.READY)
    assert heard
    assert registry.choose(Need(5, 5)) is NoPair.NO_PREFILL
    await reached(registry.add(Role.PREFILL, prefill.address), InstanceState.READY)
    pair = registry.choose(Need(5, 5))
    assert isinstance(pair, Pair)
    assert (pair.decode.instance_id, pair.prefills[0].instance_id) == ("decode-a", "prefill-a")
    assert registry.choose(Need(5, 5), frozenset({"decode-a"})) is NoPair.NO_DECODE


async def test_registering_is_idempotent_but_a_role_is_kept(
    registry: Registry, decode: FakeEngine
) -> None:
    instance = registry.add(Role.DECODE, decode.address)
    assert registry.add(Role.DECODE, decode.address) is instance
    with pytest.raises(RequestRejected, match="is registered as decode"):
        registry.add(Role.PREFILL, decode.address)
    await registry.remove(decode.address)
    with pytest.raises(NotFound):
        registry.find(decode.address)


async def test_draining_and_unready_instances_are_not_usable(
    registry: Registry, decode: FakeEngine
) -> None:
    instance = registry.add(Role.DECODE, decode.address)
    await reached(instance, InstanceState.READY)
    decode.change(draining=True)
    await reached(instance, InstanceState.DRAINING)
    assert not instance.is_usable
    decode.change(draining=False, ready=False)
    await reached(instance, InstanceState.PROBING)
    decode.change(ready=True)
    await reached(instance, InstanceState.READY)


async def test_a_lost_instance_is_down_and_comes_back_as_somebody_else(
    registry: Registry, decode: FakeEngine
) -> None:
    instance = registry.add(Role.DECODE, decode.address)
    await reached(instance, InstanceState.READY)
    instance.in_flight = 3
    await decode.stop()
    await reached(instance, InstanceState.DOWN)
    reborn = await FakeEngine(instance_id="decode-b").start(decode.address)
    await reached(instance, InstanceState.READY)
    assert (instance.instance_id, instance.in_flight) == ("decode-b", 0)
    await reborn.stop()


async def test_a_new_identity_on_the_same_stream_is_a_new_instance(
    registry: Registry, decode: FakeEngine
) -> None:
    instance = registry.add(Role.DECODE, decode.address)
    await reached(instance, InstanceState.READY)
    decode.instance_id = "decode-after-restart"
    decode.change()
    await until(lambda: instance.instance_id == "decode-after-restart")
    await reached(instance, InstanceState.READY)


@pytest.mark.parametrize(
    ("role", "fields", "reason"),
    [
        (Role.PREFILL, {}, "registered as prefill, is decode"),
        (Role.DECODE, {"vocab_size": 512}, "vocabulary of 512"),
    ],
)
async def test_an_instance_of_another_kind_is_incompatible(
    registry: Registry, decode: FakeEngine, role: Role, fields: dict[str, Any], reason: str
) -> None:
    for name, value in fields.items():
        setattr(decode, name, value)
    instance = registry.add(role, decode.address)
    await reached(instance, InstanceState.INCOMPATIBLE)
    assert reason in instance.reason
    assert not instance.is_usable


async def test_a_failed_request_makes_an_instance_suspect_until_it_answers(
    registry: Registry, decode: FakeEngine
) -> None:
    instance = registry.add(Role.DECODE, decode.address)
    await reached(instance, InstanceState.READY)
    registry.failed("decode-a", "test")
    assert instance.state is InstanceState.SUSPECT
    assert instance.is_usable
    await reached(instance, InstanceState.READY)


async def test_what_was_sent_counts_until_the_snapshot_has_it(
    registry: Registry, decode: FakeEngine, prefill: FakeEngine
) -> None:
    instance = registry.add(Role.DECODE, decode.address)
    await reached(instance, InstanceState.READY)
    await reached(registry.add(Role.PREFILL, prefill.address), InstanceState.READY)
    need = Need(17, 1)
    pair = registry.choose(need)
    assert isinstance(pair, Pair)
    lease = registry.lease(pair, need)
    assert (instance.view().pages_free, instance.view().slots_free) == (62, 7)
    assert (instance.in_flight, registry.find("prefill-a").in_flight) == (1, 1)
    lease.admitted()
    lease.prefilled()
    assert (instance.view().pages_free, instance.view().slots_free) == (64, 8)
    assert registry.find("prefill-a").in_flight == 0
    lease.release()
    assert instance.in_flight == 0


async def test_state_slots_that_plans_in_flight_read_or_fill_are_not_free(
    registry: Registry, decode: FakeEngine
) -> None:
    instance = registry.add(Role.DECODE, decode.address)
    await reached(instance, InstanceState.READY)
    total = instance.view().slots_free
    fields = ("state_slots_pinned", "state_slots_checkpoint", "state_slots_quarantined")
    decode.change(**dict(zip(fields, (2, 1, 3), strict=True)))
    await until(lambda: instance.view().slots_free != total, "the snapshot")
    assert instance.view().slots_free == total + 1 - 5, "one slot more than rows, five taken"


async def test_nothing_runs_after_stop(decode: FakeEngine) -> None:
    channels = ChannelPool()
    registry = Registry(
        channels, make_rules("round_robin", "round_robin", 0, random.Random(0)), VOCAB
    )
    instance = registry.add(Role.DECODE, decode.address)
    await reached(instance, InstanceState.READY)
    registry.failed("decode-a", "test")
    await registry.stop()
    await channels.close()
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in names if name.startswith(("follow", "probe"))]
