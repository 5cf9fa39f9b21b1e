"""The end of a `Prefill` call on the wire: `Ending`, half-close, status. And clients that do otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from k3.config.tree import ServeConfig
from k3.errors import QueueFull, Unavailable
from k3.rpc import server as rpc_server
from k3.rpc.status import from_rpc_error
from k3.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_svc.service import PrefillServicer
from prefill_svc.stream import ResponseStream

pytestmark = pytest.mark.prefill

FULL = QueueFull("no room", code="reserve_wait")
NEVER_S = 3600.0
START = prefill_pb2.PrefillRequest(start=prefill_pb2.Start(request_id="r"))
ECHO = prefill_pb2.PrefillRequest(heartbeat_echo=prefill_pb2.HeartbeatEcho(seq=1))


class Engine:
    """Ends every call as soon as it is open; is its own handoff."""

    def __init__(self, error: QueueFull | Unavailable | None) -> None:
        self._error = error
        self.n_heard = 0
        self.is_let_go = False

    def open(self, start: prefill_pb2.Start, stream: ResponseStream) -> tuple[Any, object]:
        stream.finish(self._error)
        return SimpleNamespace(handoff=self), object()

    def receive(self, export: object, message: prefill_pb2.PrefillRequest) -> None:
        self.n_heard += 1

    def lost(self, export: object) -> None:
        self.is_let_go = True


@asynccontextmanager
async def ending_call(engine: Engine, ending_timeout_s: float) -> AsyncIterator[tuple[Any, Any]]:
    """A server, and a call to it that has heard `Ending`."""
    server = rpc_server.make_server(8)
    servicer = PrefillServicer(engine, ending_timeout_s)  # type: ignore[arg-type]
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    port = rpc_server.bind(server, ServeConfig(port=0))
    await server.start()
    try:
        async with asyncio.timeout(20), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill()
            await call.write(START)
            assert (await call.read()).HasField("ending")
            yield server, call
    finally:
        await server.stop(0)


async def expect(call: Any, error: QueueFull | None) -> None:
    """The call ends with the status of `error`."""
    if error is None:
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        return
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert repr(from_rpc_error(caught.value)) == repr(error)


@pytest.mark.parametrize("error", [None, FULL])
async def test_the_status_follows_the_half_close(error: QueueFull | None) -> None:
    async with ending_call(Engine(error), NEVER_S) as (_server, call):
        await call.done_writing()
        await expect(call, error)


@pytest.mark.parametrize("error", [None, FULL])
async def test_a_client_that_never_half_closes_gets_its_status_all_the_same(
    error: QueueFull | None,
) -> None:
    async with ending_call(Engine(error), 0.05) as (_server, call):
        await expect(call, error)


async def test_what_a_client_says_after_ending_is_taken_and_costs_no_status() -> None:
    engine = Engine(FULL)
    async with ending_call(engine, NEVER_S) as (_server, call):
        for _ in range(20):
            await call.write(ECHO)
        await call.done_writing()
        await expect(call, FULL)
    assert engine.n_heard == 20


async def test_a_client_that_goes_away_meanwhile_leaves_no_handler() -> None:
    engine = Engine(FULL)
    async with ending_call(engine, NEVER_S) as (server, call):
        call.cancel()
        await server.stop(NEVER_S)  # returns once no handler runs
    assert engine.is_let_go


async def test_a_server_that_stops_waits_for_no_client_beyond_its_grace() -> None:
    engine = Engine(FULL)
    async with ending_call(engine, NEVER_S) as (server, _call):
        await server.stop(0.05)
    assert engine.is_let_go


async def test_a_server_that_stops_still_says_how_a_call_ended() -> None:
    draining = Unavailable("ends its requests", code="draining")
    async with ending_call(Engine(draining), NEVER_S) as (server, call):
        stopping = asyncio.create_task(server.stop(NEVER_S))
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert repr(from_rpc_error(caught.value)) == repr(draining)
        await stopping
