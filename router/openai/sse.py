"""Writing answers: a JSON body at the end, or server-sent events as they come.

Both outlets take the updates of a generation and end with `done` or `fail`. A stream sends its headers only with
the first token, so that failures before it are proper HTTP errors; while that takes long, headers go out and comments
follow. After the first byte a failure is an `error` event, and no `[DONE]` follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.types import Send

from router.openai.answer import Answer, usage
from router.openai.errors import ApiError
from router.openai.generation import Counts, Update

STREAM_HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


async def send_json(
    send: Send, status: int, body: Any, headers: Mapping[str, str] | None = None
) -> None:
    """One whole JSON response."""
    content = orjson.dumps(body)
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    raw += [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})


class JsonOutlet:
    """Collects everything, sends one body."""

    def __init__(
        self,
        send: Send,
        answer: Answer,
        n_choices: int,
        counts: Callable[[], Counts],
        headers: Mapping[str, str],
    ) -> None:
        self._send = send
        self._answer = answer
        self._counts = counts
        self._headers = headers
        self._updates: list[list[Update]] = [[] for _ in range(n_choices)]

    async def update(self, update: Update) -> None:
        """Keep it."""
        self._updates[update.index].append(update)

    async def done(self, headers: Mapping[str, str]) -> None:
        """Send the body."""
        body = self._answer.body(self._updates, self._counts())
        await send_json(self._send, 200, body, {**self._headers, **headers})

    async def fail(self, error: ApiError) -> None:
        """Send the error."""
        await send_json(self._send, error.status, error.body, error.headers)


class SseOutlet:
    """Sends events. include_usage, continuous: what stream_options ask for."""

    def __init__(
        self,
        send: Send,
        answer: Answer,
        counts: Callable[[], Counts],
        headers: Mapping[str, str],
        *,
        include_usage: bool,
        continuous: bool,
    ) -> None:
        self._send = send
        self._answer = answer
        self._counts = counts
        self._headers = {**STREAM_HEADERS, **headers}
        self._include_usage = include_usage
        self._continuous = continuous
        self._is_open = False
        self._opened: set[int] = set()
        self._has_token = False
        self._lock = asyncio.Lock()  # events of several choices, and pings, go out one at a time

    async def update(self, update: Update) -> None:
        """Send what there is to say."""
        chunks = self._answer.chunks(update)
        if update.index not in self._opened:
            self._opened.add(update.index)
            chunks = self._answer.opening(update.index) + chunks
        events = b"".join(_event(self._with_usage(chunk)) for chunk in chunks)
        async with self._lock:
            self._has_token = True
            if events:
                await self._write(events)

    async def heartbeat(self, interval_s: float) -> None:
        """Comments until the first token; runs until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            async with self._lock:
                if self._has_token:
                    return
                await self._write(b": ping\n\n")

    async def done(self, headers: Mapping[str, str]) -> None:
        """Usage if asked for, then the end."""
        end = b"data: [DONE]\n\n"
        if self._include_usage:
            end = _event(self._answer.usage_chunk(self._counts())) + end
        async with self._lock:
            await self._write(end, is_last=True)

    async def fail(self, error: ApiError) -> None:
        """An HTTP error while nothing has been sent, else an error event and no `[DONE]`."""
        async with self._lock:
            if self._is_open:
                await self._write(_event(error.body), is_last=True)
            else:
                await send_json(self._send, error.status, error.body, error.headers)

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self._continuous:
            return chunk | {"usage": usage(self._counts())}
        return chunk | {"usage": None} if self._include_usage else chunk

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        if not self._is_open:
            self._is_open = True
            raw = [(name.lower().encode(), value.encode()) for name, value in self._headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
