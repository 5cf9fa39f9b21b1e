"""One contract, two agents: what holds for the real library holds for the one that simulations use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from k3.errors import TransferError
from k3.transfer import nixl
from k3.transfer.agent import (
    BATCHES,
    BatchesRefused,
    Handle,
    Indices,
    Lists,
    PeerLost,
    Region,
    Stripes,
    TransferAgent,
    WriteFailed,
)
from k3.transfer.batching import BatchingAgent
from k3.transfer.local import LocalFabric
from k3.transfer.nixl import IDLE_CPU_LIMIT, METADATA_LIMIT, NixlAgent

RECORD = b"r" * 32
UNITS, STRIDE = 7, 96


class Pair:
    """Two agents of one kind with a pool each."""

    def __init__(self, build: Callable[[str], TransferAgent]) -> None:
        self.build = build
        random = np.random.default_rng(3)
        self.source = random.integers(0, 256, (UNITS, STRIDE), np.uint8)
        self.target = np.full((UNITS, STRIDE), 0xA5, np.uint8)
        self.sender, self.receiver = build("sender"), build("receiver")
        self.sender.register([region(self.source)])
        self.receiver.register([region(self.target)])

    def connect(self) -> None:
        self.sender.connect(self.receiver.name, self.receiver.metadata())

    def notes(self, n: int) -> list[bytes]:
        found: list[bytes] = []
        deadline = time.monotonic() + 5
        while len(found) < n and time.monotonic() < deadline:
            found += self.receiver.notes()
        return found

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def region(pool: np.ndarray) -> Region:
    return Region("pool", pool.ctypes.data, 0, "DRAM", pool.shape[1], pool.shape[0])


def stripes(pool: np.ndarray, *offsets: int, length: int = 8) -> Stripes:
    starts = tuple(pool.ctypes.data + offset for offset in offsets)
    return Stripes("DRAM", 0, starts, length, STRIDE, UNITS)


def wait(agent: TransferAgent, handle) -> None:
    deadline = time.monotonic() + 5
    while not agent.poll(handle):
        assert time.monotonic() < deadline


BATCHED = partial(NixlAgent, is_batched=True)


def batching(name: str) -> BatchingAgent:
    return BatchingAgent(BATCHED(name), lambda: NixlAgent(name))


@pytest.fixture(params=["local", "nixl", "nixl in batches", "batching"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    fabric = LocalFabric(time.monotonic)
    kinds = {"local": fabric.build, "nixl": NixlAgent, "nixl in batches": BATCHED}
    pair = Pair((kinds | {"batching": batching})[request.param])
    yield pair
    pair.close()


def test_a_write_moves_the_named_pieces_and_no_other_byte(pair):
    pair.connect()
    lists = pair.sender.prepare(
        pair.receiver.name, stripes(pair.source, 0, 24), stripes(pair.target, 16, 40)
    )
    source = np.array([0, 5, UNITS + 2], np.int32)
    target = np.array([3, 1, UNITS + 6], np.int32)
    wait(pair.sender, pair.sender.write(lists, source, target, RECORD))
    assert pair.notes(1) == [RECORD]
    expected = np.full_like(pair.target, 0xA5)
    expected[3, 16:24] = pair.source[0, 0:8]
    expected[1, 16:24] = pair.source[5, 0:8]
    expected[6, 40:48] = pair.source[2, 24:32]
    np.testing.assert_array_equal(pair.target, expected)
    assert pair.receiver.notes() == []


def test_a_record_can_go_alone(pair):
    pair.connect()
    pair.sender.notify(pair.receiver.name, RECORD)
    assert pair.notes(1) == [RECORD]


def test_metadata_under_another_name_is_refused(pair):
    with pytest.raises(PeerLost, match=r"announced as 'somebody'"):
        pair.sender.connect("somebody", pair.receiver.metadata())


def test_pieces_outside_the_peers_pools_are_refused(pair):
    pair.connect()
    with pytest.raises(TransferError):
        pair.sender.prepare(
            pair.receiver.name,
            stripes(pair.source, 0),
            stripes(pair.target, STRIDE * UNITS),
        )


def test_an_unknown_peer_is_lost(pair):
    with pytest.raises(TransferError):
        pair.sender.notify("nobody", RECORD)


def test_a_peer_can_be_forgotten_and_met_again(pair):
    pair.connect()
    pair.sender.disconnect(pair.receiver.name)
    pair.sender.disconnect(pair.receiver.name)
    other = pair.build("receiver")
    other.register([region(pair.target)])
    pair.sender.connect(other.name, other.metadata())
    lists = pair.sender.prepare(other.name, stripes(pair.source, 0), stripes(pair.target, 0))
    one = np.array([1], np.int32)
    wait(pair.sender, pair.sender.write(lists, one, one, RECORD))
    np.testing.assert_array_equal(pair.target[1, :8], pair.source[1, :8])
    other.close()


def test_names_are_never_used_twice(pair):
    again = pair.build("sender")
    assert again.name != pair.sender.name
    again.close()


def test_closing_twice_is_closing_once(pair):
    pair.connect()
    pair.sender.close()
    pair.sender.close()


def test_a_pool_is_registered_once():
    agent = NixlAgent("test")
    pool = np.zeros((UNITS, STRIDE), np.uint8)
    agent.register([region(pool)])
    with pytest.raises(TransferError, match="registered already"):
        agent.register([region(pool)])
    agent.close()


def test_metadata_beyond_its_bound_is_not_looked_at():
    agent = NixlAgent("test")
    with pytest.raises(PeerLost, match=f"the limit is {METADATA_LIMIT}"):
        agent.connect("peer", b"x" * (METADATA_LIMIT + 1))
    agent.close()


def test_bytes_that_are_no_metadata_lose_the_peer():
    agent = NixlAgent("test")
    with pytest.raises(PeerLost, match="cannot load agent 'peer'"):
        agent.connect("peer", b"nonsense")
    agent.close()


def test_an_idle_agent_sleeps():
    agent = NixlAgent("test")
    shares = [agent.check_idle_cpu() for _ in range(3)]
    assert min(shares) < IDLE_CPU_LIMIT, shares
    agent.close()


def lose(has_written: bool) -> PeerLost:
    """What writing to a peer raises once it has closed."""
    pair = Pair(BATCHED)
    pair.connect()
    lists = pair.sender.prepare(
        pair.receiver.name, stripes(pair.source, 0), stripes(pair.target, 0)
    )
    one = np.array([1], np.int32)
    if has_written:
        wait(pair.sender, pair.sender.write(lists, one, one, RECORD))
    pair.receiver.close()
    with pytest.raises(PeerLost) as lost:
        wait(pair.sender, pair.sender.write(lists, one, one, RECORD))
    pair.close()
    return lost.value


def test_a_peer_lost_before_any_write_reached_it_may_refuse_batches():
    assert isinstance(lose(has_written=False), BatchesRefused)


def test_a_peer_that_writes_have_reached_is_only_lost():
    assert not isinstance(lose(has_written=True), BatchesRefused)


def test_the_switch_of_the_library_is_set_only_while_an_agent_is_built(monkeypatch):
    monkeypatch.delenv(BATCHES, raising=False)
    seen: list[str | None] = []
    create = nixl.api.nixl_agent.create_backend

    def look(*arguments: Any) -> None:
        seen.append(os.environ.get(BATCHES))
        create(*arguments)

    monkeypatch.setattr(nixl.api.nixl_agent, "create_backend", look)
    NixlAgent("test").close()
    agent = BATCHED("test")
    assert seen == [None, "1"]
    assert BATCHES not in os.environ
    agent.close()
    monkeypatch.setenv(BATCHES, "0")
    agent = BATCHED("test")
    assert os.environ[BATCHES] == "0"
    agent.close()
    monkeypatch.setenv(BATCHES, "1")  # as a rank on a GPU begins
    NixlAgent("test").close()
    assert (seen[-1], os.environ[BATCHES]) == ("0", "1")


class Refusing(NixlAgent):
    """Its peers take no batches."""

    def write(self, lists: Lists, source: Indices, target: Indices, record: bytes) -> Handle:
        raise BatchesRefused("no protocol")


def test_what_is_refused_in_a_batch_arrives_from_the_second_agent():
    pair = Pair(lambda name: BatchingAgent(Refusing(name), lambda: NixlAgent(name)))
    pair.connect()
    lists = pair.sender.prepare(
        pair.receiver.name, stripes(pair.source, 0), stripes(pair.target, 0)
    )
    several = np.array([1, 4], np.int32)
    with pytest.raises(WriteFailed):
        pair.sender.write(lists, several, several, RECORD)
    for _ in range(2):
        wait(pair.sender, pair.sender.write(lists, several, several, RECORD))
    assert pair.notes(2) == [RECORD, RECORD]
    np.testing.assert_array_equal(pair.target[several, :8], pair.source[several, :8])
    pair.close()
