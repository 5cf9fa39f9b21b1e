"""`RemotePrefill` against a real gRPC server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from decode_svc.intake.remote import OUTGOING_LIMIT, RemotePrefill
from decode_svc.intake.source import Ended, Heard, Pair, PrefillLost, Proof
from k3.config.tree import ServeConfig
from k3.errors import LayoutMismatch, QueueFull, ReconnectRequired, RequestAborted, Unavailable
from k3.rpc import server as rpc_server
from k3.rpc.client import ChannelPool
from k3.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_svc.service import PrefillServicer
from prefill_svc.stream import ResponseStream

Handler = Callable[[AsyncIterator[Any], Any], AsyncIterator[prefill_pb2.PrefillResponse]]


class Servicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Answers as the test says."""

    def __init__(self) -> None:
        self.instance_id = "prefill-1"
        self.stream: Handler | None = None
        self.heard: list[str | None] = []
        self.is_cancelled = asyncio.Event()
        self.state = prefill_pb2.QUIESCE_STATE_QUIESCED

    async def Connect(self, request: Any, context: Any) -> prefill_pb2.ConnectResponse:
        return prefill_pb2.ConnectResponse(
            instance_id=self.instance_id, layout_fingerprint=request.layout_fingerprint
        )

    async def Quiesce(self, request: Any, context: Any) -> prefill_pb2.QuiesceResponse:
        return prefill_pb2.QuiesceResponse(instance_id=self.instance_id, states=[self.state])

    async def Prefill(self, messages: AsyncIterator[Any], context: Any) -> None:
        assert self.stream is not None
        try:
            async for response in self.stream(messages, context):
                await context.write(response)
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise


class Peer:
    """A server, a client and what the client's stream delivers."""

    def __init__(self, servicer: Servicer, server: grpc.aio.Server, port: int) -> None:
        self.servicer = servicer
        self.server = server
        self.address = f"127.0.0.1:{port}"
        self.channels = ChannelPool()
        self.inbox: asyncio.Queue[Heard | Ended] = asyncio.Queue()
        self.remote = RemotePrefill(self.channels, self._introduction, self._check)
        self.pair = Pair(self.address, "prefill-1", prefill_pb2.Geometry())

    def _introduction(self) -> prefill_pb2.ConnectRequest:
        return prefill_pb2.ConnectRequest(instance_id="decode-1", layout_fingerprint="f")

    def _check(self, answer: prefill_pb2.ConnectResponse) -> None:
        if answer.layout_fingerprint != "f":
            raise LayoutMismatch("differs")

    async def next(self) -> Heard | Ended:
        async with asyncio.timeout(10):
            return await self.inbox.get()


async def with_peer(
    story: Callable[[Peer], Awaitable[None]],
    real: prefill_pb2_grpc.PrefillServiceServicer | None = None,
) -> None:
    server = rpc_server.make_server(8)
    servicer = Servicer()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(real or servicer, server)
    port = rpc_server.bind(server, ServeConfig(port=0))
    await server.start()
    peer = Peer(servicer, server, port)
    try:
        await story(peer)
    finally:
        await peer.channels.close()
        await server.stop(0)


def start() -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(start=prefill_pb2.Start(request_id="r"))


async def test_connect_gives_the_answering_instance() -> None:
    async def story(peer: Peer) -> None:
        assert (await peer.remote.connect(peer.address)).instance_id == "prefill-1"

    await with_peer(story)


async def test_a_stream_delivers_messages_and_then_its_end_once() -> None:
    async def echo(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for message in messages:
            if message.WhichOneof("message") == "received":
                return
            yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.Accepted())

    async def story(peer: Peer) -> None:
        peer.servicer.stream = echo
        call = peer.remote.open(peer.pair, peer.inbox.put_nowait)
        await call.send(start())
        assert isinstance(await peer.next(), Heard)
        await call.send(prefill_pb2.PrefillRequest(received=prefill_pb2.Received(generation=1)))
        assert await peer.next() == Ended(None)
        await call.send(start())  # on an ended stream it is simply dropped
        call.cancel()
        call.cancel()
        assert peer.inbox.empty()

    await with_peer(story)


async def test_an_error_of_ours_arrives_as_it_was_raised() -> None:
    async def full(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        await anext(messages)
        raise QueueFull("no room", code="reserve_wait", retry_after_s=4.0)
        yield

    async def story(peer: Peer) -> None:
        peer.servicer.stream = full
        call = peer.remote.open(peer.pair, peer.inbox.put_nowait)
        await call.send(start())
        ended = await peer.next()
        assert isinstance(ended, Ended)
        assert isinstance(ended.error, QueueFull)
        assert (ended.error.code, ended.error.retry_after_s) == ("reserve_wait", 4.0)

    await with_peer(story)


async def test_a_refusal_is_heard_whatever_was_said_meanwhile() -> None:
    async def refuse(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        await anext(messages)
        raise ReconnectRequired("who are you?")
        yield

    async def story(peer: Peer) -> None:
        peer.servicer.stream = refuse
        destination = prefill_pb2.PrefillRequest(destination=prefill_pb2.Destination(nonce=1))
        for i in range(200):
            call = peer.remote.open(peer.pair, peer.inbox.put_nowait)
            await call.send(start())
            for _ in range(3):
                await asyncio.sleep(1e-4 * (i % 10))
                await call.send(destination)
            ended = await peer.next()
            assert isinstance(ended, Ended)
            assert isinstance(ended.error, ReconnectRequired), f"call {i}: {ended.error!r}"

    await with_peer(story)


@pytest.mark.parametrize("error", [None, QueueFull("no room", code="reserve_wait")])
async def test_the_end_of_a_call_is_heard_whatever_was_said_meanwhile(
    error: QueueFull | None,
) -> None:
    """Regression: an echo that met the end of its call turned the status into an internal error."""

    class Handoff:
        """Sends heartbeats, ends in the middle of their echoes."""

        def open(self, start: prefill_pb2.Start, stream: ResponseStream) -> tuple[Any, Any]:
            async def beat() -> None:
                for seq in range(3):
                    progress = prefill_pb2.Progress(seq=seq)
                    stream.send(prefill_pb2.PrefillResponse(progress=progress))
                    await asyncio.sleep(1e-4 * random.random())
                stream.finish(error)

            return SimpleNamespace(handoff=self), asyncio.create_task(beat())

        def receive(self, export: object, message: prefill_pb2.PrefillRequest) -> None:
            assert message.HasField("heartbeat_echo")

        def lost(self, export: asyncio.Task[None]) -> None:
            export.cancel()

    async def story(peer: Peer) -> None:
        random = Random(0)
        echo = prefill_pb2.PrefillRequest(heartbeat_echo=prefill_pb2.HeartbeatEcho(seq=1))
        for i in range(200):
            call = peer.remote.open(peer.pair, peer.inbox.put_nowait)
            await call.send(start())
            while isinstance(heard := await peer.next(), Heard):
                for _ in range(3):
                    await call.send(echo)
                    await asyncio.sleep(1e-4 * random.random())
            assert repr(heard.error) == repr(error), f"call {i}"

    random = Random(1)
    await with_peer(story, PrefillServicer(Handoff()))  # type: ignore[arg-type]


async def test_calls_that_a_stopping_server_ends_are_told_why() -> None:
    """What a drained prefill instance does: all calls end in its own words while the server goes down."""
    streams: list[ResponseStream] = []

    def open_(start: prefill_pb2.Start, stream: ResponseStream) -> tuple[Any, object]:
        streams.append(stream)
        stream.send(prefill_pb2.PrefillResponse(accepted=prefill_pb2.Accepted()))
        nothing = SimpleNamespace(receive=lambda *_: None, lost=lambda _: None)
        return SimpleNamespace(handoff=nothing), object()

    async def story(peer: Peer) -> None:
        calls = [peer.remote.open(peer.pair, peer.inbox.put_nowait) for _ in range(6)]
        for call in calls:
            await call.send(start())
            assert isinstance(await peer.next(), Heard)
        for stream in streams:
            stream.finish(Unavailable("ends its requests", code="draining"))
        stopping = asyncio.create_task(peer.server.stop(5.0))
        for _ in calls:
            ended = await peer.next()
            assert isinstance(ended, Ended)
            assert isinstance(ended.error, Unavailable)
            assert ended.error.code == "draining"
        await stopping

    engine = SimpleNamespace(open=open_)
    await with_peer(story, PrefillServicer(engine))  # type: ignore[arg-type]


async def test_a_call_that_is_cancelled_when_it_ends_is_told_once() -> None:
    """The cancellation meets `Ending` at any point of the call's end."""

    def open_(start: prefill_pb2.Start, stream: ResponseStream) -> tuple[Any, object]:
        stream.send(prefill_pb2.PrefillResponse(accepted=prefill_pb2.Accepted()))
        stream.finish(QueueFull("no room", code="reserve_wait"))
        nothing = SimpleNamespace(receive=lambda *_: None, lost=lambda _: None)
        return SimpleNamespace(handoff=nothing), object()

    async def story(peer: Peer) -> None:
        for i in range(60):
            call = peer.remote.open(peer.pair, peer.inbox.put_nowait)
            await call.send(start())
            assert isinstance(await peer.next(), Heard)
            await asyncio.sleep(1e-4 * (i % 20))
            call.cancel()
            ended = await peer.next()
            assert isinstance(ended, Ended)
            assert isinstance(ended.error, QueueFull | RequestAborted), f"call {i}: {ended.error!r}"
        await peer.server.stop(60.0)  # returns once no handler runs
        assert peer.inbox.empty()

    engine = SimpleNamespace(open=open_)
    await with_peer(story, PrefillServicer(engine))  # type: ignore[arg-type]


async def test_a_server_that_goes_down_is_lost() -> None:
    async def hang(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.Accepted())
        await asyncio.Event().wait()

    async def story(peer: Peer) -> None:
        peer.servicer.stream = hang
        call = peer.remote.open(peer.pair, peer.inbox.put_nowait)
        await call.send(start())
        assert isinstance(await peer.next(), Heard)
        await peer.server.stop(0)
        ended = await peer.next()
        assert isinstance(ended, Ended)
        assert isinstance(ended.error, PrefillLost)
        with pytest.raises(PrefillLost) as caught:
            await peer.remote.quiesce(peer.pair, 5)
        assert caught.value.code == "refused", str(caught.value)

    await with_peer(story)


async def test_cancelling_reaches_the_server_and_is_told_here() -> None:
    async def hang(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.Accepted())
        await asyncio.Event().wait()

    async def story(peer: Peer) -> None:
        peer.servicer.stream = hang
        call = peer.remote.open(peer.pair, peer.inbox.put_nowait)
        await call.send(start())
        await peer.next()
        call.cancel()
        ended = await peer.next()
        assert isinstance(ended, Ended)
        assert isinstance(ended.error, RequestAborted)
        async with asyncio.timeout(10):
            await peer.servicer.is_cancelled.wait()

    await with_peer(story)


async def test_a_server_that_reads_nothing_loses_the_call_and_never_blocks_us() -> None:
    async def deaf(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.Accepted())
        await asyncio.Event().wait()

    async def story(peer: Peer) -> None:
        peer.servicer.stream = deaf
        call = peer.remote.open(peer.pair, peer.inbox.put_nowait)
        await peer.next()
        long = prefill_pb2.PrefillRequest(start=prefill_pb2.Start(token_ids=range(100_000)))
        async with asyncio.timeout(10):
            for _ in range(2 * OUTGOING_LIMIT):
                await call.send(long)
        ended = await peer.next()
        assert isinstance(ended, Ended)
        assert isinstance(ended.error, PrefillLost)

    await with_peer(story)


async def test_quiesce_tells_quiet_draining_and_dead_apart() -> None:
    async def story(peer: Peer) -> None:
        assert await peer.remote.quiesce(peer.pair, 5) is Proof.QUIET
        peer.servicer.state = prefill_pb2.QUIESCE_STATE_STILL_DRAINING
        assert await peer.remote.quiesce(peer.pair, 5) is Proof.DRAINING
        peer.servicer.instance_id = "prefill-2"
        assert await peer.remote.quiesce(peer.pair, 5) is Proof.DEAD

    await with_peer(story)
