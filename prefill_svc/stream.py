"""The answers of one `Prefill` call on their way to the caller: a bounded queue with an end.

The handoff puts messages in without waiting; the call's handler takes them out. Heartbeats replace each other while
they wait, so a slow reader costs no memory; one that lets everything else pile up loses the call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from k3.errors import K3Error, RequestAborted
from k3.v1 import prefill_pb2

MAX_MESSAGES = 4096


class ResponseStream:
    """Messages in order, then the end. One reader."""

    def __init__(self) -> None:
        self._messages: deque[prefill_pb2.PrefillResponse] = deque()
        self._wake = asyncio.Event()
        self._is_finished = False
        self.error: K3Error | None = None

    def send(self, response: prefill_pb2.PrefillResponse) -> None:
        """Queue a message; nothing happens after the end."""
        if self._is_finished:
            return
        if len(self._messages) >= MAX_MESSAGES:
            self.finish(RequestAborted(f"{MAX_MESSAGES} messages wait to be read; read faster"))
            return
        newest = self._messages[-1] if self._messages else None
        if newest is not None and newest.HasField("progress") and response.HasField("progress"):
            self._messages.pop()
        self._messages.append(response)
        self._wake.set()

    def finish(self, error: K3Error | None) -> None:
        """End the stream after what is queued. Idempotent: the first end counts."""
        if self._is_finished:
            return
        self._is_finished, self.error = True, error
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Messages until the end; look at `error` afterwards. Waits as long as the handoff's deadlines let it."""
        while True:
            while self._messages:
                yield self._messages.popleft()
            if self._is_finished:
                return
            self._wake.clear()
            await self._wake.wait()
