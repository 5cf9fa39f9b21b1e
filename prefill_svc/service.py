"""PrefillService over gRPC: takes messages off the wire, hands them to the engine, writes its answers.

Decode is the client. A call that ends without `Received`, `Quiesced` or an error of ours was lost; the engine then
drains what was posted, on its own. A call ends in two steps: we say `Ending`, the client half-closes, the status
follows; a client that writes into the end of its call would lose that status. Health, reflection and InstanceService
are the process frame's (`k3/rpc/engine.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from k3.cache.layout import PROTO_VERSION
from k3.errors import LayoutMismatch, RequestRejected
from k3.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_svc.driver import PrefillEngine
from prefill_svc.export import Export
from prefill_svc.incarnation import Incarnation
from prefill_svc.stream import ResponseStream

log = logging.getLogger("k3.prefill")

SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name
FIRST_MESSAGE_TIMEOUT_S = 10.0
ENDING_TIMEOUT_S = 5.0
MAX_QUIESCE_IDS = 65536

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """One per process; all state is the engine's."""

    def __init__(self, engine: PrefillEngine, ending_timeout_s: float = ENDING_TIMEOUT_S) -> None:
        """ending_timeout_s: for a client to half-close; a slower one may lose the status of its call."""
        self._engine = engine
        self._ending_timeout_s = ending_timeout_s

    async def Connect(
        self, request: prefill_pb2.ConnectRequest, context: Context
    ) -> prefill_pb2.ConnectResponse:
        """Introduce a decode instance."""
        return await self._engine.life().connect(request)

    async def Quiesce(
        self, request: prefill_pb2.QuiesceRequest, context: Context
    ) -> prefill_pb2.QuiesceResponse:
        """State of transfers whose stream was lost; running ones are aborted."""
        if request.proto_version != PROTO_VERSION:
            raise LayoutMismatch(
                f"proto_version: {PROTO_VERSION} != {request.proto_version}; run the same release on both"
            )
        if len(request.transfer_ids) > MAX_QUIESCE_IDS:
            raise RequestRejected(
                f"{len(request.transfer_ids)} transfer ids, at most {MAX_QUIESCE_IDS}; ask in parts",
                param="transfer_ids",
            )
        life = self._engine.life()
        return prefill_pb2.QuiesceResponse(
            instance_id=life.instance_id, states=life.handoff.quiesce(request)
        )

    async def Prefill(
        self, request: AsyncIterator[prefill_pb2.PrefillRequest], context: Context
    ) -> None:
        """One request, from Start to its end."""
        start = await _first(request)
        stream = ResponseStream()
        life, export = self._engine.open(start, stream)
        reader = asyncio.create_task(_read(request, life, export), name=f"read {start.request_id}")
        try:
            async for response in stream:
                await context.write(response)
            await context.write(prefill_pb2.PrefillResponse(ending=prefill_pb2.Ending()))
            await asyncio.wait([reader], timeout=self._ending_timeout_s)
        finally:
            reader.cancel()
            life.handoff.lost(export)
            (ended,) = await asyncio.gather(reader, return_exceptions=True)
            if isinstance(ended, Exception):
                log.error("reading a call failed with a bug", exc_info=ended)
        if stream.error is not None:
            raise stream.error


async def _first(messages: AsyncIterator[prefill_pb2.PrefillRequest]) -> prefill_pb2.Start:
    try:
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
            first = await anext(messages)
    except StopAsyncIteration as error:
        raise RequestRejected("the stream ended before Start", param="start") from error
    if not first.HasField("start"):
        kind = first.WhichOneof("message")
        raise RequestRejected(f"the first message is {kind!r}, expected Start", param="start")
    return first.start


async def _read(
    messages: AsyncIterator[prefill_pb2.PrefillRequest], life: Incarnation, export: Export
) -> None:
    """Hand over what decode says. A stream that ends, or breaks, before the request does was lost."""
    try:
        async for message in messages:
            life.handoff.receive(export, message)
    except RequestRejected as error:  # bytes that are no message
        life.handoff.lost(export, error)
    finally:
        life.handoff.lost(export)
