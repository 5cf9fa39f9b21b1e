"""Callers that stay alive and read nothing: whoever sends to one waits so long, and then lets go.

Such a caller answers keepalives, so gRPC never gives it up, and flow control would hold its handler for ever. The bound
is longer than the router's for its own clients: a router held up by one must be rid of it first.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from k3.errors import RequestAborted

CALL_S = 120.0  # for one message of a call
CANCEL_S = 1.0  # for the cancellation of a call that ended under a write


class BoundedContext:
    """The context of a streaming call whose `write` waits at most limit_s; all else is the context's own."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], limit_s: float) -> None:
        self._context = context
        self._limit_s = limit_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Send a message. Raises RequestAborted when the peer reads none; cancelled when the call has ended."""
        try:
            async with asyncio.timeout(self._limit_s):
                await self._context.write(message)
        except TimeoutError as error:
            text = f"no message of the call was read for {self._limit_s:g} s; read faster"
            raise RequestAborted(text, code="not_read") from error
        except grpc.aio.InternalError:
            await asyncio.sleep(CANCEL_S)  # the write heard of the end before our task did
            raise
