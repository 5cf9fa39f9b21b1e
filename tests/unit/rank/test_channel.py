"""Frames between a front and its ranks: whole, in order, bounded, and an end that is noticed."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from k3.errors import ConfigError
from k3.rank.channel import (
    MAX_FRAME_BYTES,
    AsyncChannel,
    BlockingChannel,
    TcpAddress,
    UnixAddress,
    encode,
    listen,
    parse_address,
)
from k3.v1 import plan_pb2


def result(step_id: int) -> plan_pb2.RankMessage:
    return plan_pb2.RankMessage(result=plan_pb2.StepResult(step_id=step_id))


def progress(text: str) -> plan_pb2.RankMessage:
    return plan_pb2.RankMessage(progress=plan_pb2.LoadProgress(stage=text))


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    channel = BlockingChannel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/tmp/x", UnixAddress("/tmp/x")),
        ("unix:@x", UnixAddress("\0x")),
        ("tcp:localhost:50000", TcpAddress("localhost", 50000)),
        ("tcp:[::1]:1", TcpAddress("::1", 1)),
    ],
)
def test_an_address_is_a_path_or_a_port(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "/tmp/x", "unix:x", "unix:@", "tcp:host", "tcp::1", "tcp:h:0", "tcp:h:65536"]
)
def test_anything_else_is_refused_with_both_forms(text):
    with pytest.raises(ConfigError, match="expected unix:/path, unix:@name or tcp:host:port"):
        parse_address(text)


def test_frames_arrive_whole_however_they_are_cut(ends):
    channel, theirs = ends
    data = encode(result(1)) + encode(progress("x" * 200_000)) + encode(result(2))
    ready: list[plan_pb2.RankMessage] = []
    for at in range(0, len(data), 4_093):
        theirs.sendall(data[at : at + 4_093])
        ready += channel.receive_ready(plan_pb2.RankMessage)
    assert ready == [result(1), progress("x" * 200_000), result(2)]
    assert channel.receive_ready(plan_pb2.RankMessage) == []


def test_what_came_before_the_end_is_delivered_before_it_raises(ends):
    channel, theirs = ends
    theirs.sendall(encode(result(1)))
    theirs.close()
    assert channel.receive_ready(plan_pb2.RankMessage) == [result(1)]
    with pytest.raises(EOFError):
        channel.receive_ready(plan_pb2.RankMessage)
    with pytest.raises(EOFError):
        channel.receive(plan_pb2.RankMessage)


def test_an_empty_message_is_a_frame(ends):
    channel, theirs = ends
    theirs.sendall(encode(plan_pb2.RankMessage()))
    assert channel.receive(plan_pb2.RankMessage) == plan_pb2.RankMessage()


def test_a_frame_beyond_the_bound_is_refused_before_it_is_read(ends):
    channel, theirs = ends
    theirs.sendall(struct.pack(">I", MAX_FRAME_BYTES + 1))
    with pytest.raises(ConnectionError, match=f"the limit is {MAX_FRAME_BYTES}"):
        channel.receive(plan_pb2.RankMessage)


def test_a_message_too_big_to_send_is_refused(ends):
    channel, _theirs = ends
    with pytest.raises(ConnectionError, match="RankMessage"):
        channel.send(progress("x" * (MAX_FRAME_BYTES + 1)))


def test_bytes_that_are_no_message_are_refused(ends):
    channel, theirs = ends
    theirs.sendall(struct.pack(">I", 3) + b"\xff\xff\xff")
    with pytest.raises(ConnectionError, match="is not a RankMessage"):
        channel.receive(plan_pb2.RankMessage)


@pytest.mark.parametrize("kind", ["unix", "abstract", "tcp"])
async def test_both_ends_talk_over_both_addresses(kind, tmp_path):
    met: asyncio.Queue[AsyncChannel] = asyncio.Queue(1)
    if kind == "unix":
        address = UnixAddress(str(tmp_path / "s"))
    elif kind == "abstract":
        address = UnixAddress(f"\0{tmp_path}")
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = TcpAddress("127.0.0.1", probe.getsockname()[1])
    async with asyncio.timeout(10), await listen(address, met.put):
        dialled = asyncio.to_thread(BlockingChannel.connect, address, 5.0)
        rank, front = await asyncio.gather(dialled, met.get())
        rank.send(result(9))
        assert await front.receive(plan_pb2.RankMessage) == result(9)
        await front.send(result(10), 5.0)
        assert await asyncio.to_thread(rank.receive, plan_pb2.RankMessage) == result(10)
        rank.close()
        with pytest.raises(EOFError):
            await front.receive(plan_pb2.RankMessage)
        front.close()


def test_dialling_nobody_ends_at_the_deadline(tmp_path):
    with pytest.raises(FileNotFoundError):
        BlockingChannel.connect(UnixAddress(str(tmp_path / "nobody")), 0.05)
