"""Bytes that are no message end a call of any kind as the caller's fault, without a traceback."""

from __future__ import annotations

import logging

import grpc
import grpc.aio
import pytest

from k3.config.tree import ServeConfig
from k3.errors import RequestRejected
from k3.rpc import server
from k3.rpc.status import from_rpc_error
from k3.v1 import instance_pb2_grpc, prefill_pb2_grpc

NO_MESSAGE = b"\xff\xff"


class Instance(instance_pb2_grpc.InstanceServiceServicer):
    """Never asked."""

    async def Describe(self, request, context):
        raise AssertionError(request)

    async def Watch(self, request, context):
        raise AssertionError(request)
        yield


class Prefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Reads what comes."""

    async def Prefill(self, request_iterator, context):
        async for _ in request_iterator:
            pass
        raise AssertionError("the stream ended well")


@pytest.mark.parametrize(
    "method", ["InstanceService/Describe", "InstanceService/Watch", "PrefillService/Prefill"]
)
async def test_bytes_that_are_no_message_are_rejected(method, caplog):
    grpc_server = server.make_server(4)
    instance_pb2_grpc.add_InstanceServiceServicer_to_server(Instance(), grpc_server)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(Prefill(), grpc_server)
    port = server.bind(grpc_server, ServeConfig(port=0))
    await grpc_server.start()
    try:
        async with grpc.aio.insecure_channel(f"localhost:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await sent(channel, f"/k3.v1.{method}")
    finally:
        await grpc_server.stop(None)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(caught.value)
    assert isinstance(error, RequestRejected)
    assert (error.code, str(error).split(";")[0]) == (
        "invalid_message",
        "2 bytes that are no message of this method",
    )
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


async def sent(channel: grpc.aio.Channel, method: str) -> object:
    if method.endswith("Describe"):
        return await channel.unary_unary(method)(NO_MESSAGE)
    if method.endswith("Watch"):
        return await channel.unary_stream(method)(NO_MESSAGE).read()
    call = channel.stream_stream(method)()
    await call.write(b"")  # a message without content
    await call.write(NO_MESSAGE)
    return await call.read()
