"""Callers that live and read nothing: their handlers end within the bound, and nobody else is held up."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from k3.config.tree import ServeConfig
from k3.rpc import server as rpc_server
from k3.rpc import unread
from k3.rpc.status import from_rpc_error
from k3.v1 import instance_pb2, instance_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.mute_client import mute_client

UNREAD_S = 0.1
NEVER_S = 3600.0
CALLS = {"generator": "/k3.v1.InstanceService/Watch", "writer": "/k3.v1.PrefillService/Prefill"}
NEWS = instance_pb2.WatchResponse(instance_id="x" * 50_000)


class Endless(instance_pb2_grpc.InstanceServiceServicer, prefill_pb2_grpc.PrefillServiceServicer):
    """Talks without end, and counts who does."""

    def __init__(self) -> None:
        self.n_begun = self.n_running = 0

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.n_begun += 1
        self.n_running += 1
        try:
            yield
        finally:
            self.n_running -= 1

    async def Describe(self, request: Any, context: Any) -> instance_pb2.DescribeResponse:
        return instance_pb2.DescribeResponse(instance_id="one")

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[instance_pb2.WatchResponse]:
        with self._counted():
            while True:
                yield NEWS

    async def Prefill(self, request: Any, context: Any) -> None:
        with self._counted():
            while True:
                await context.write(prefill_pb2.PrefillResponse(ending=prefill_pb2.Ending()))


@asynccontextmanager
async def serving(unread_s: float) -> AsyncIterator[tuple[Endless, str, Any]]:
    servicer, server = Endless(), rpc_server.make_server(8, unread_s)
    instance_pb2_grpc.add_InstanceServiceServicer_to_server(servicer, server)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{rpc_server.bind(server, ServeConfig(port=0))}"
    await server.start()
    try:
        async with asyncio.timeout(20), grpc.aio.insecure_channel(address) as channel:
            yield servicer, address, instance_pb2_grpc.InstanceServiceStub(channel)
    finally:
        await server.stop(0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # the server's block has a deadline
        await asyncio.sleep(0.005)


async def exhaust(call: Any) -> None:
    while await call.read() == NEWS:
        pass


@pytest.mark.parametrize("path", CALLS.values(), ids=CALLS)
async def test_the_handlers_of_a_client_that_reads_nothing_end(path: str) -> None:
    async with serving(UNREAD_S) as (servicer, address, stub), mute_client(address) as client:
        for _ in range(3):
            client.call(path, instance_pb2.WatchRequest())
        await until(lambda: servicer.n_begun == 3)
        answer = await stub.Describe(instance_pb2.DescribeRequest())
        await until(lambda: servicer.n_running == 0)
        assert answer.instance_id == "one"


async def test_whoever_reads_after_all_gets_the_rest_and_the_reason() -> None:
    async with serving(UNREAD_S) as (servicer, _address, stub):
        call = stub.Watch(instance_pb2.WatchRequest())
        assert await call.read() == NEWS
        await until(lambda: servicer.n_running == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await exhaust(call)
    error = from_rpc_error(caught.value)
    assert (error.code, str(error)) == (
        "not_read",
        "no message of the call was read for 0.1 s; read faster",
    )


async def test_a_deadline_under_a_write_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(NEVER_S) as (servicer, _address, stub):
        call = stub.Watch(instance_pb2.WatchRequest(), timeout=0.5)
        assert await call.read() == NEWS
        await until(lambda: servicer.n_begun == 1 and servicer.n_running == 0)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []


class Transport(asyncio.Transport):
    """Holds what the peer has not taken, before what a socket holds."""

    n_waiting = 0
    is_aborted = False
    limits: tuple[int | None, int | None] | None = None

    def __init__(self, end: socket.socket) -> None:
        super().__init__({"socket": end})

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.limits = (high, low)

    def get_write_buffer_size(self) -> int:
        return self.n_waiting

    def abort(self) -> None:
        self.is_aborted = True


class Http(asyncio.Protocol):
    """In the place of uvicorn's."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport


class Connection(unread.BoundedConnection, Http):
    """Its own loop, which says when it is to be called."""

    def __init__(self, end: socket.socket) -> None:
        self.loop: Any = self
        self.timer: Any = None
        self.connection_made(Transport(end))

    def call_later(self, delay_s: float, callback: Callable[[int], None], n: int) -> Any:
        assert delay_s == unread.HTTP_S
        self.timer = lambda: callback(n)
        return self

    def cancel(self) -> None:
        self.timer = None


Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Ours and the peer's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def waiting(n_bytes: int, ends: Ends) -> tuple[Connection, Transport]:
    connection = Connection(ends[0])
    transport = connection.transport
    assert isinstance(transport, Transport)
    assert transport.limits == (0, None)
    transport.n_waiting = n_bytes
    connection.pause_writing()
    return connection, transport


def test_a_connection_that_takes_little_is_served_on_and_one_that_takes_less_is_cut(
    ends: Ends,
) -> None:
    connection, transport = waiting(10 * unread.MIN_BYTES, ends)
    for _ in range(3):
        transport.n_waiting -= unread.MIN_BYTES
        connection.timer()
        assert not transport.is_aborted
    transport.n_waiting -= unread.MIN_BYTES - 1
    connection.timer()
    assert transport.is_aborted


def test_what_a_peer_takes_from_the_kernel_alone_is_taken(ends: Ends) -> None:
    for _ in range(2):
        ends[0].sendall(bytes(unread.MIN_BYTES))
    connection, transport = waiting(1, ends)
    for _ in range(2):
        assert len(ends[1].recv(unread.MIN_BYTES, socket.MSG_WAITALL)) == unread.MIN_BYTES
        connection.timer()
        assert not transport.is_aborted
    connection.timer()
    assert transport.is_aborted


@pytest.mark.parametrize("end", ["resume_writing", "connection_lost"])
def test_nothing_is_judged_once_nothing_waits(end: str, ends: Ends) -> None:
    connection, _transport = waiting(1, ends)
    connection.resume_writing() if end == "resume_writing" else connection.connection_lost(None)
    assert connection.timer is None
