"""A decode instance that lives and reads nothing: its `Prefill` call ends, and lets go of the memory it held."""

from __future__ import annotations

import grpc.aio
import pytest

from k3.config.tree import ServeConfig
from k3.rpc import server as rpc_server
from k3.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_svc.service import PrefillServicer
from tests.mute_client import mute_client
from tests.unit.prefill_svc.test_driver import World

pytestmark = pytest.mark.prefill


async def test_a_call_nobody_reads_ends_and_another_goes_on() -> None:
    world = World()
    running = await world.start()
    await world.connect()
    server = rpc_server.make_server(8, unread_s=0.2)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(world.engine), server)
    address = f"127.0.0.1:{rpc_server.bind(server, ServeConfig(port=0))}"
    await server.start()
    start = prefill_pb2.PrefillRequest(start=world.start_of())
    try:
        async with mute_client(address) as client, grpc.aio.insecure_channel(address) as channel:
            client.call("/k3.v1.PrefillService/Prefill", start)
            await world.until(lambda: world.engine.n_open == 1)
            call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill()
            await call.write(start)
            said = [(await call.read()).WhichOneof("message") for _ in range(2)]
            assert (world.engine.load().pages_free, said) == (6, ["accepted", "prefilled"])
            await world.until(lambda: world.engine.load().pages_free == 7)
            assert world.engine.n_open == 1
            await call.write(prefill_pb2.PrefillRequest(abort=prefill_pb2.Abort()))
            assert (await call.read()).HasField("quiesced")
    finally:
        await server.stop(0)
        await world.engine.stop()
        await running
