"""A router that lives and reads nothing: its `Generate` call ends, and lets go of the memory it held."""

from __future__ import annotations

import asyncio

import grpc.aio

from decode_svc.service import DecodeServicer
from k3.config.tree import ServeConfig
from k3.rpc import server as rpc_server
from k3.v1 import decode_pb2, decode_pb2_grpc
from tests.mute_client import mute_client
from tests.unit.decode_svc.test_driver import Stage, request, until


async def test_a_call_nobody_reads_ends_and_another_goes_on() -> None:
    """The prompt's candidate takes the connection and says nothing: memory is held as long as the call."""
    stage = Stage()
    await stage.engine.start(lambda *_: None)
    running = asyncio.create_task(stage.engine.run())
    server = rpc_server.make_server(8, unread_s=0.2)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(stage.engine), server)
    address = f"127.0.0.1:{rpc_server.bind(server, ServeConfig(port=0))}"
    await server.start()
    deaf = rpc_server.bound_socket("127.0.0.1", 0)
    deaf.listen()
    candidate = decode_pb2.PrefillCandidate(
        instance_id="p", address=f"127.0.0.1:{deaf.getsockname()[1]}"
    )
    message = request(candidates=[candidate])
    try:
        async with mute_client(address) as client, grpc.aio.insecure_channel(address) as channel:
            client.call("/k3.v1.DecodeService/Generate", message)
            await until(lambda: stage.engine.n_open == 1)
            call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(message)
            assert (await call.read()).HasField("admitted")
            assert stage.engine.load().pages_free == 8
            await until(lambda: stage.engine.load().pages_free == 10)
            assert stage.engine.n_open == 1
            call.cancel()
            await until(lambda: stage.engine.load().pages_free == 12)
    finally:
        deaf.close()
        await server.stop(0)
        await stage.engine.stop()
        await running
