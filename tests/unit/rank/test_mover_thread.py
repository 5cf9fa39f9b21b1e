"""The mover's thread around a real core: it leaves the device alone while a step is recorded."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from k3.rank.channel import BlockingChannel
from k3.rank.mover import Mover, MoverCore
from k3.v1 import plan_pb2
from tests.movers import Net

WAIT_S = 10.0
LONG_ENOUGH_S = 0.1  # for a thread that does not wait to have gone on


@pytest.fixture
def ends() -> Iterator[tuple[BlockingChannel, BlockingChannel]]:
    """The mover's end of a transfer connection and the front's."""
    pair = socket.socketpair()
    ours, fronts = (BlockingChannel(end) for end in pair)
    yield ours, fronts
    ours.close()
    fronts.close()


def test_agents_are_built_and_turned_only_between_recordings(
    ends: tuple[BlockingChannel, BlockingChannel],
) -> None:
    ours, front = ends
    (node,) = Net(kinds="m").out
    tested, built = threading.Event(), threading.Event()

    def make(_found: plan_pb2.SelfTest | None) -> MoverCore:
        built.set()
        return node.core

    recording = threading.Lock()
    mover = Mover(make, ours, recording, tested.set)
    with recording:
        mover.start()
        assert tested.wait(WAIT_S), "the self-test takes the lock itself"
        assert not built.wait(LONG_ENOUGH_S)
    assert built.wait(WAIT_S)
    with recording:
        front.send(plan_pb2.TransferCommand(rebuild=plan_pb2.RebuildAgent()))
        threading.Event().wait(LONG_ENOUGH_S)
        assert not [s for s in front.receive_ready(plan_pb2.TransferStatus) if s.HasField("ready")]
    while not front.receive(plan_pb2.TransferStatus).HasField("ready"):
        pass  # heartbeats
    mover.stop(WAIT_S)
