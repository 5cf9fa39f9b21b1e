"""The queue of answers: order, end, bounds."""

from __future__ import annotations

import asyncio

from k3.errors import RequestAborted, Unavailable
from k3.v1 import prefill_pb2
from prefill_svc.stream import MAX_MESSAGES, ResponseStream


def progress(seq: int) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(progress=prefill_pb2.Progress(seq=seq))


def quiesced() -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(quiesced=prefill_pb2.Quiesced(generation=1))


async def read(stream: ResponseStream) -> list[prefill_pb2.PrefillResponse]:
    return [response async for response in stream]


async def test_what_was_said_before_the_end_is_still_delivered() -> None:
    stream = ResponseStream()
    stream.send(quiesced())
    stream.finish(Unavailable("lost"))
    stream.send(quiesced())
    stream.finish(None)
    assert len(await read(stream)) == 1
    assert isinstance(stream.error, Unavailable)


async def test_a_reader_that_waits_gets_what_comes_later() -> None:
    stream = ResponseStream()
    reader = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    stream.send(progress(1))
    await asyncio.sleep(0)
    stream.finish(None)
    assert [r.progress.seq for r in await reader] == [1]


async def test_waiting_heartbeats_replace_each_other() -> None:
    stream = ResponseStream()
    for seq in range(1, 100):
        stream.send(progress(seq))
    stream.send(quiesced())
    stream.send(progress(100))
    stream.finish(None)
    seen = await read(stream)
    assert [r.WhichOneof("message") for r in seen] == ["progress", "quiesced", "progress"]
    assert seen[0].progress.seq == 99


async def test_a_reader_that_does_not_read_loses_the_call() -> None:
    stream = ResponseStream()
    for _ in range(MAX_MESSAGES + 1):
        stream.send(quiesced())
    assert isinstance(stream.error, RequestAborted)
