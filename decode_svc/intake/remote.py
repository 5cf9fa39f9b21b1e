"""`RemotePrefill`: prefill instances over gRPC. The only file of the decode service's intake that knows the wire.

A broken connection is told from an answer by the error code that our servers always send along: without one nobody of
ours spoke, and the instance counts as lost. A write that meets the end of its call makes the library forget that answer
and report an internal error: so after its first message a call says nothing until it was answered, and from `Ending`
on, which comes before every later end, it says nothing but that it is done. That keeps every answer intact.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from decode_svc.intake.source import Deliver, Ended, Heard, Pair, PrefillLost, Proof
from k3.cache.layout import PROTO_VERSION
from k3.errors import K3Error, RequestAborted
from k3.rpc.client import ChannelPool, call_metadata
from k3.rpc.status import ERROR_CODE, from_rpc_error
from k3.v1 import prefill_pb2, prefill_pb2_grpc

CONNECT_DEADLINE_S = 20.0  # every prefill rank loads our agents and makes connections
QUIESCE_DEADLINE_S = 3.0
OUTGOING_LIMIT = 256

Call = grpc.aio.StreamStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]


class RemotePrefill:
    """See `PrefillSource`. introduction: a fresh ConnectRequest (agents change after a fence).

    check: raises LayoutMismatch when the answering instance does not fit this one.
    """

    def __init__(
        self,
        channels: ChannelPool,
        introduction: Callable[[], prefill_pb2.ConnectRequest],
        check: Callable[[prefill_pb2.ConnectResponse], None],
    ) -> None:
        self._channels = channels
        self._introduction = introduction
        self._check = check

    async def connect(self, address: str) -> Pair:
        """Introduce this instance."""
        mine = self._introduction()
        try:
            answer = await self._stub(address).Connect(
                mine, timeout=CONNECT_DEADLINE_S, metadata=call_metadata()
            )
        except grpc.aio.AioRpcError as error:
            raise spoken_or_lost(error, address) from error
        self._check(answer)
        sends_draft = mine.draft_fingerprint not in ("",) and (
            mine.draft_fingerprint == answer.draft_fingerprint
        )
        return Pair(address, answer.instance_id, answer.geometry, sends_draft)

    def open(self, pair: Pair, deliver: Deliver) -> RemoteCall:
        """Open a stream."""
        call = self._stub(pair.address).Prefill(metadata=call_metadata())
        return RemoteCall(call, pair, deliver)

    async def quiesce(self, pair: Pair, transfer_id: int) -> Proof:
        """Ask about one transfer."""
        request = prefill_pb2.QuiesceRequest(
            proto_version=PROTO_VERSION,
            instance_id=self._introduction().instance_id,
            prefill_instance_id=pair.instance_id,
            transfer_ids=[transfer_id],
        )
        try:
            answer = await self._stub(pair.address).Quiesce(request, timeout=QUIESCE_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise spoken_or_lost(error, pair.address) from error
        if answer.instance_id != pair.instance_id:
            return Proof.DEAD  # another process answers at this address
        quiet = prefill_pb2.QUIESCE_STATE_QUIESCED
        return Proof.QUIET if list(answer.states) == [quiet] else Proof.DRAINING

    def _stub(self, address: str) -> prefill_pb2_grpc.PrefillServiceStub:
        return prefill_pb2_grpc.PrefillServiceStub(self._channels.channel(address))


class RemoteCall:
    """One open stream: a task reads, another one writes, so neither ever blocks the attempt."""

    def __init__(self, call: Call, pair: Pair, deliver: Deliver) -> None:
        self._call = call
        self._pair = pair
        self._deliver = deliver
        self._cancelled_for: K3Error | None = None
        self._outgoing: asyncio.Queue[prefill_pb2.PrefillRequest | None]  # None: done
        self._outgoing = asyncio.Queue(OUTGOING_LIMIT)
        self._is_answered = asyncio.Event()
        self._is_ending = False
        self._writer = asyncio.create_task(self._write(), name=f"to {pair.address}")
        self._reader = asyncio.create_task(self._read(), name=f"from {pair.address}")

    async def send(self, message: prefill_pb2.PrefillRequest) -> None:
        """Queue one message; a peer that reads none for too long loses the call."""
        if self._is_ending or self._reader.done():
            return
        if self._outgoing.full():
            text = f"prefill instance at {self._pair.address} does not read: {OUTGOING_LIMIT} messages wait"
            self._cancel(PrefillLost(text))
            return
        self._outgoing.put_nowait(message)

    def cancel(self) -> None:
        """End the call."""
        self._cancel(RequestAborted("the prefill call was cancelled here"))

    def _cancel(self, why: K3Error) -> None:
        self._cancelled_for = self._cancelled_for or why
        self._call.cancel()
        self._writer.cancel()

    async def _write(self) -> None:
        try:
            while (message := await self._outgoing.get()) is not None:
                await self._call.write(message)
                await self._is_answered.wait()
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            return  # the reader learns why

    def _end(self) -> None:
        self._is_ending = True
        while not self._outgoing.empty():
            self._outgoing.get_nowait()  # nobody listens any more
        self._outgoing.put_nowait(None)

    async def _read(self) -> None:
        error: K3Error | None = None
        try:
            async for message in _messages(self._call):
                self._is_answered.set()
                if message.HasField("ending"):
                    self._end()
                else:
                    self._deliver(Heard(message))
        except grpc.aio.AioRpcError as failure:
            error = spoken_or_lost(failure, self._pair.address)
        except asyncio.CancelledError:
            # without a reason of ours the other side's server went down under the call
            text = f"prefill instance at {self._pair.address} cancelled the call"
            error = self._cancelled_for or PrefillLost(text)
        self._writer.cancel()
        self._deliver(Ended(error))


async def _messages(call: Call) -> AsyncIterator[prefill_pb2.PrefillResponse]:
    async for message in call:
        yield message


def spoken_or_lost(error: grpc.aio.AioRpcError, address: str) -> K3Error:
    """What a failed call means: the peer's own words, or that the peer is lost."""
    names = {name for name, _value in error.trailing_metadata() or ()}
    if ERROR_CODE in names:
        return from_rpc_error(error)
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.UNKNOWN | grpc.StatusCode.INTERNAL:
            text = f"prefill instance at {address} is lost: {error.details()}"
            is_dead = "connection refused" in (error.details() or "").lower()
            code = "refused" if is_dead else None
            return PrefillLost(text, code=code)
        case _:
            return from_rpc_error(error)
