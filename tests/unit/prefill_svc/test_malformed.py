"""A decode instance that sends bytes that are no message, after its Start: the call ends as its fault."""

from __future__ import annotations

import logging

import grpc.aio
import pytest

from k3.config.tree import ServeConfig
from k3.errors import RequestRejected
from k3.rpc import server as rpc_server
from k3.rpc.status import from_rpc_error
from k3.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_svc.service import PrefillServicer
from tests.unit.prefill_svc.test_driver import World

pytestmark = pytest.mark.prefill


async def test_bytes_that_are_no_message_end_a_request_and_give_its_pages_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    running = await world.start()
    await world.connect()
    n_free = world.engine.load().pages_free
    server = rpc_server.make_server(8)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(world.engine), server)
    address = f"127.0.0.1:{rpc_server.bind(server, ServeConfig(port=0))}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(
                "/k3.v1.PrefillService/Prefill",
                response_deserializer=prefill_pb2.PrefillResponse.FromString,
            )()
            await call.write(prefill_pb2.PrefillRequest(start=world.start_of()).SerializeToString())
            await world.until(lambda: world.engine.n_open == 1)
            await call.write(b"\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [answer async for answer in call]
            await world.until(lambda: world.engine.load().pages_free == n_free)
    finally:
        await server.stop(0)
        await world.engine.stop()
        await running
    assert isinstance(from_rpc_error(caught.value), RequestRejected)
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
