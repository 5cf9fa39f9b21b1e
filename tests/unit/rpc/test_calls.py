"""Real calls over loopback: statuses, metadata, scope, streaming forms, cancellation, taken ports, TLS."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from k3 import errors
from k3.config.tree import ServeConfig
from k3.rpc import client, server, status
from k3.telemetry import tracing
from k3.v1 import instance_pb2, instance_pb2_grpc


class Scripted(instance_pb2_grpc.InstanceServiceServicer):
    """Answers or raises what the test says."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.scopes: list[tracing.Scope | None] = []
        self.closed = asyncio.Event()

    async def Describe(self, request, context):
        self.scopes.append(tracing.current())
        if self.error is not None:
            raise self.error
        return instance_pb2.DescribeResponse(instance_id="one")

    async def Watch(self, request, context):
        try:
            for n in range(3):
                yield instance_pb2.WatchResponse(instance_id=str(n))
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        finally:
            self.closed.set()

    async def Drain(self, request, context):
        await asyncio.sleep(60)


@asynccontextmanager
async def running(
    serve: ServeConfig | None = None, tls: client.ClientTls | None = None
) -> AsyncIterator[tuple[Scripted, instance_pb2_grpc.InstanceServiceStub, str]]:
    scripted, grpc_server = Scripted(), server.make_server(4)
    instance_pb2_grpc.add_InstanceServiceServicer_to_server(scripted, grpc_server)
    port = server.bind(grpc_server, serve or ServeConfig(port=0))
    await grpc_server.start()
    pool = client.ChannelPool(tls)
    address = f"localhost:{port}"
    try:
        yield scripted, instance_pb2_grpc.InstanceServiceStub(pool.channel(address)), address
    finally:
        await pool.close()
        await grpc_server.stop(None)


ERRORS = [
    errors.RequestRejected("bad seed", code="invalid_type", param="seed.é"),
    errors.NotFound("no such model"),
    errors.QueueFull("64 waiting", retry_after_s=2.5),
    errors.Unavailable("draining", code="draining"),
    errors.GroupFailed("rank 1 died"),
    errors.LayoutMismatch("page_tokens: 8 != 16"),
    errors.ReconnectRequired("unknown peer"),
    errors.DeadlineExceeded("too late"),
    errors.RequestAborted("generation 2 came"),
    errors.TransferError("3 records missing"),
    errors.K3Error("odd"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
async def test_an_exception_arrives_as_the_same_exception(error):
    async with running() as (scripted, stub, _):
        scripted.error = error
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Describe(instance_pb2.DescribeRequest())
    received = status.from_rpc_error(caught.value)
    assert type(received) is type(error)
    assert (str(received), received.code) == (str(error), error.code)
    assert status.http_status(received) == status.http_status(error)
    match received, error:
        case errors.RequestRejected(), errors.RequestRejected():
            assert received.param == "seed.\\xe9"
        case errors.QueueFull(), errors.QueueFull():
            assert received.retry_after_s == error.retry_after_s


async def test_the_text_of_a_bug_does_not_reach_the_caller():
    async with running() as (scripted, stub, _):
        scripted.error = ValueError("secret path")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Describe(instance_pb2.DescribeRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    assert "ValueError" in (caught.value.details() or "")


async def test_a_very_long_message_still_arrives():
    async with running() as (scripted, stub, _):
        scripted.error = errors.NotFound("x" * 100_000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Describe(instance_pb2.DescribeRequest())
    assert type(status.from_rpc_error(caught.value)) is errors.NotFound


async def test_an_error_in_a_stream_follows_its_messages():
    async with running() as (scripted, stub, _):
        scripted.error = errors.GroupFailed("rank 0 died")
        call = stub.Watch(instance_pb2.WatchRequest())
        seen = [(await call.read()).instance_id for _ in range(3)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert seen == ["0", "1", "2"]
    assert type(status.from_rpc_error(caught.value)) is errors.GroupFailed


async def test_cancelling_a_stream_ends_its_generator():
    async with running() as (scripted, stub, _):
        call = stub.Watch(instance_pb2.WatchRequest())
        assert (await call.read()).instance_id == "0"
        call.cancel()
        async with asyncio.timeout(20):
            await scripted.closed.wait()


async def test_request_id_and_trace_of_the_caller_reach_the_handler():
    scope = tracing.Scope("req-7", tracing.Trace("ab" * 16, "cd" * 8, 1, "vendor=1"))
    async with running() as (scripted, stub, _):
        metadata = client.call_metadata(scope)
        await stub.Describe(instance_pb2.DescribeRequest(), metadata=metadata)
        await stub.Describe(instance_pb2.DescribeRequest())
    given, made = scripted.scopes
    assert given is not None
    assert made is not None
    assert given.request_id == "req-7"
    assert given.trace == replace(scope.trace, span_id=given.trace.span_id)
    assert given.trace.span_id != scope.trace.span_id
    assert made.request_id.startswith("req-")
    assert made.trace.trace_id != given.trace.trace_id


async def test_a_deadline_ends_the_call_with_its_own_error():
    async with running() as (_, stub, _address):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Drain(instance_pb2.DrainRequest(), timeout=0.05)
    assert type(status.from_rpc_error(caught.value)) is errors.DeadlineExceeded


async def test_a_peer_that_does_not_listen_is_unavailable_within_the_deadline():
    pool = client.ChannelPool()
    try:
        with pytest.raises(errors.Unavailable, match=r"no connection to 127\.0\.0\.1:9 within"):
            await pool.ready("127.0.0.1:9", 0.2)
    finally:
        await pool.close()


async def test_a_pool_gives_one_channel_per_address():
    pool = client.ChannelPool()
    first = pool.channel("127.0.0.1:9")
    assert pool.channel("127.0.0.1:9") is first
    await pool.drop("127.0.0.1:9")
    assert pool.channel("127.0.0.1:9") is not first
    await pool.close()


async def test_a_taken_port_is_refused_with_a_free_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(errors.PortInUse, match=rf"serve.port={port}: .* is free") as caught:
            server.bind(server.make_server(1), ServeConfig(port=port))
    free = int(str(caught.value).split("; ")[1].split()[0])
    server.check_port("127.0.0.1", free, "serve.port")


async def test_two_servers_do_not_share_a_port():
    async with running() as (_, _stub, address):
        port = int(address.rpartition(":")[2])
        with pytest.raises(errors.PortInUse):
            server.bind(server.make_server(1), ServeConfig(port=port))


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid"])
async def test_a_host_of_another_machine_is_a_configuration_error(host):
    with pytest.raises(errors.ConfigError, match="give an address of this machine"):
        server.bind(server.make_server(1), ServeConfig(host=host, port=0))


async def test_a_dial_is_given_up_after_the_configured_time():
    deaf = socket.socket()  # its backlog is full: what dials it hears nothing at all
    deaf.bind(("127.0.0.1", 0))
    deaf.listen(0)
    port = deaf.getsockname()[1]
    fill = [socket.socket() for _ in range(4)]
    for sock in fill:
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", port))
    pool = client.ChannelPool(connect_timeout_s=0.2)
    stub = instance_pb2_grpc.InstanceServiceStub(pool.channel(f"127.0.0.1:{port}"))
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Describe(instance_pb2.DescribeRequest(), timeout=1.5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # not DEADLINE_EXCEEDED
    finally:
        await pool.close()
        for sock in (deaf, *fill):
            sock.close()
