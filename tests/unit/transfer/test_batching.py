"""A peer that takes no batches is served without them; others and later writes never notice."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from k3.errors import TransferError
from k3.transfer.agent import (
    BatchesRefused,
    Handle,
    Indices,
    Lists,
    PeerLost,
    Region,
    Stripes,
    WriteFailed,
)
from k3.transfer.batching import BatchingAgent
from k3.transfer.local import LocalAgent, LocalFabric

RECORD = b"r" * 32
ONE = np.array([1], np.int32)
UNITS, STRIDE = 5, 16


class Refusing(LocalAgent):
    """Writes to nobody whose name begins with "tcp"."""

    n_refused = 0

    def write(self, lists: Lists, source: Indices, target: Indices, record: bytes) -> Handle:
        if self._lists[lists].peer.startswith("tcp"):
            Refusing.n_refused += 1
            raise BatchesRefused("no protocol")
        return LocalAgent.write(self, lists, source, target, record)


class Full(LocalAgent):
    """Has no room for pools."""

    def register(self, _regions: Sequence[Region]) -> None:
        raise TransferError("no memory to register")


class World:
    """A batching sender and two receivers with a pool each."""

    def __init__(self) -> None:
        self.fabric = LocalFabric(time.monotonic)
        self.seconds: list[LocalAgent] = []
        first = Refusing("first", self.fabric)
        self.fabric.agents["first"] = first
        self.sender = BatchingAgent(first, self._second)
        self.pools = [np.zeros((UNITS, STRIDE), np.uint8) for _ in range(3)]
        self.pools[0][:] = np.arange(1, UNITS + 1, dtype=np.uint8)[:, None]
        self.sender.register([region(self.pools[0])])
        self.receivers = [self.fabric.build("ipc"), self.fabric.build("tcp")]
        for agent, pool in zip(self.receivers, self.pools[1:], strict=True):
            agent.register([region(pool)])
            self.sender.connect(agent.name, agent.metadata())

    def _second(self) -> LocalAgent:
        self.seconds.append(self.fabric.build("second"))
        return self.seconds[-1]

    def prepare(self, which: int) -> Lists:
        name, pools = self.receivers[which].name, (self.pools[0], self.pools[1 + which])
        return self.sender.prepare(name, *map(stripes, pools))

    def write(self, lists: Lists) -> None:
        try:
            handle = self.sender.write(lists, ONE, ONE, RECORD)
        except WriteFailed:  # as whoever posts does
            handle = self.sender.write(lists, ONE, ONE, RECORD)
        while not self.sender.poll(handle):
            pass


def region(pool: np.ndarray) -> Region:
    return Region("pool", pool.ctypes.data, 0, "DRAM", STRIDE, UNITS)


def stripes(pool: np.ndarray) -> Stripes:
    return Stripes("DRAM", 0, (pool.ctypes.data,), STRIDE, STRIDE, UNITS)


@pytest.fixture
def world() -> Iterator[World]:
    Refusing.n_refused = 0
    world = World()
    yield world
    world.sender.close()


def test_a_peer_that_takes_batches_never_needs_the_second_agent(world):
    world.write(world.prepare(0))
    assert world.pools[1][1].tolist() == world.pools[0][1].tolist()
    assert world.seconds == []


def test_a_peer_that_refuses_a_batch_gets_it_and_all_later_ones_from_the_second(world):
    lists, later = world.prepare(1), world.prepare(1)
    for one in (lists, later, world.prepare(1), world.prepare(0)):
        world.write(one)
    for pool in world.pools[1:]:
        assert pool[1].tolist() == world.pools[0][1].tolist()
    world.sender.notify(world.receivers[1].name, RECORD)
    assert world.receivers[1].notes() == [RECORD] * 4
    assert (Refusing.n_refused, len(world.seconds)) == (1, 1)


def test_a_peer_that_neither_reaches_is_lost(world):
    lists = world.prepare(1)
    world.fabric.kill(world.receivers[1].name)
    with pytest.raises(PeerLost, match="gone"):
        world.sender.write(lists, ONE, ONE, RECORD)


def test_a_forgotten_peer_is_tried_in_batches_again(world):
    world.write(world.prepare(1))
    receiver = world.receivers[1]
    world.sender.disconnect(receiver.name)
    world.sender.connect(receiver.name, receiver.metadata())
    world.write(world.prepare(1))
    assert (Refusing.n_refused, len(world.seconds)) == (2, 1)


def test_without_a_second_agent_the_peer_is_lost_and_tried_again_later(world, monkeypatch):
    """A failure to build or to register one must not end the mover, which knows what to do with a lost peer."""
    lists, build = world.prepare(1), world.sender._build_second
    full = Full("full", world.fabric)
    monkeypatch.setattr(world.sender, "_build_second", lambda: full)
    with pytest.raises(PeerLost, match="no memory to register"):
        world.sender.write(lists, ONE, ONE, RECORD)
    assert full.is_closed
    monkeypatch.setattr(world.sender, "_build_second", build)
    world.write(lists)
    assert world.pools[2][1].tolist() == world.pools[0][1].tolist()


def test_what_was_refused_counts_as_a_failed_write(world):
    """What raised may still land: only who posts knows how long to wait before it says that all is quiet."""
    with pytest.raises(WriteFailed, match="no protocol"):
        world.sender.write(world.prepare(1), ONE, ONE, RECORD)


def test_closing_closes_both(world):
    world.write(world.prepare(1))
    world.sender.close()
    assert world.seconds[0].is_closed
    assert not world.fabric.is_alive("first")
