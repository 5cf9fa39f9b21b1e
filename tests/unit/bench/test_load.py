"""The load generator against a small HTTP server that speaks the streaming protocol from a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from k3.bench.load import Arrivals, Record, drive
from k3.bench.prompts import ChatWorkload, RandomWorkload

Handler = Callable[[asyncio.StreamWriter, dict[str, object]], Awaitable[None]]
WORK = ChatWorkload(output_tokens=16, seed=3)


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """One connection a request: read it, let `handler` write, close."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        await handler(writer, json.loads(await reader.readexactly(length)))
        writer.close()
        await writer.wait_closed()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


def head(status: str = "200 OK", content: str = "text/event-stream") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {content}\r\nConnection: close\r\n\r\n".encode()


def event(n_tokens: int, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": finish}
    usage = {"prompt_tokens": 9, "completion_tokens": n_tokens, "total_tokens": 9 + n_tokens}
    return b"data: " + json.dumps({"choices": [choice], "usage": usage}).encode() + b"\n\n"


async def one(handler: Handler) -> Record:
    async with server(handler) as url:
        (record,) = await drive(url, WORK, Arrivals(1, 1, 0.0, 0), timeout_s=5.0)
    return record


async def test_a_step_of_several_tokens_counts_as_that_many() -> None:
    async def handler(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        assert body["stream"] is True
        writer.write(head() + event(1) + event(4) + event(5, "stop") + b"data: [DONE]\n\n")

    record = await one(handler)
    assert (record.error, record.output_tokens, record.prompt_tokens) == ("", 5, 9)
    assert len(record.gaps_s) == 4
    assert record.finish_reason == "stop"


async def test_a_stream_without_done_is_an_error() -> None:
    async def handler(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        writer.write(head() + event(1))

    assert (await one(handler)).error == "stream: ended without [DONE]"


async def test_an_error_event_and_an_error_status_are_named_by_their_code() -> None:
    async def in_stream(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        writer.write(head() + event(1) + b'data: {"error":{"code":"instance_failed"}}\n\n')

    async def at_once(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        refusal = b'{"error":{"code":"queue_full"}}'
        writer.write(head("429 Too Many Requests", "application/json") + refusal)

    assert (await one(in_stream)).error == "stream: instance_failed"
    assert (await one(at_once)).error == "HTTP 429: queue_full"


async def test_no_server_is_a_transport_error_not_an_exception() -> None:
    (record,) = await drive("http://127.0.0.1:9", WORK, Arrivals(1, 1, 0.0, 0), timeout_s=5.0)
    assert record.error == "transport: ConnectError"


async def test_never_more_requests_in_flight_than_asked_for() -> None:
    in_flight, most = 0, 0
    full = asyncio.Event()

    async def handler(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        if in_flight == 3:
            full.set()
        await asyncio.wait_for(full.wait(), 5.0)
        in_flight -= 1
        writer.write(head() + event(1, "stop") + b"data: [DONE]\n\n")

    async with server(handler) as url:
        records = await drive(url, WORK, Arrivals(11, 3, 0.0, 0), timeout_s=5.0)
    assert [r.error for r in records] == [""] * 11
    assert most == 3


def test_open_loop_arrivals_repeat_with_their_seed_and_keep_the_rate() -> None:
    arrivals = Arrivals(1001, 8, rate_per_s=50.0, seed=7)
    offsets = list(arrivals.offsets())
    assert offsets == list(arrivals.offsets())
    assert offsets[-1] == pytest.approx(20.0, rel=0.15)


def test_random_prompts_have_the_exact_length_and_stay_in_the_vocabulary() -> None:
    call = RandomWorkload(prompt_tokens=63, output_tokens=5, vocab=17, seed=1).call(4)
    assert len(call.body["prompt"]) == 63
    assert set(call.body["prompt"]) <= set(range(17))
    assert call == RandomWorkload(63, 5, 17, 1).call(4)
