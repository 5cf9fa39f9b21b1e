"""Peers that stay alive and read nothing: whoever sends to one waits so long, and then lets go.

Such a peer answers keepalives, so neither the kernel nor gRPC gives it up, and flow control would hold its writer for
ever. `BoundedContext` ends the handler of a gRPC call, `BoundedConnection` cuts an HTTP connection. Calls are given
longer: a router held up by its own client must be rid of that client first, and gRPC opens a window in steps of up to
some megabytes, so that one message may wait for minutes although the caller, or its client, reads.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from typing import Any

import grpc.aio

from k3.errors import RequestAborted

CALL_S = 600.0  # for one message of a call; as long as a request may take by default
HTTP_S = 60.0  # for MIN_BYTES of what waits on a connection
MIN_BYTES = 16 << 10
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


class BoundedConnection(asyncio.Protocol):
    """Comes before a protocol of uvicorn: aborts the transport when the peer takes too little of what waits for it.

    A slow peer is served on; a connection that is closing behind its last bytes is bounded as well. What the kernel
    still holds counts too: it takes more from us in steps of a megabyte, and a slow peer needs minutes for one.
    """

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Writing pauses with the first byte that has to wait."""
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing waits any more."""
        self._stop_unread_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Something waits; asyncio calls this once until `resume_writing`."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """The peer has taken all."""
        self._stop_unread_timer()
        super().resume_writing()

    def _watch(self) -> None:
        self._unread_timer = self.loop.call_later(HTTP_S, self._judge, self._n_waiting())

    def _n_waiting(self) -> int:
        """Bytes that the peer has not taken, ours and the kernel's."""
        fd = self.transport.get_extra_info("socket").fileno()
        kernels = int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return self.transport.get_write_buffer_size() + kernels

    def _judge(self, n_waiting: int) -> None:
        if n_waiting - self._n_waiting() < MIN_BYTES:
            self.transport.abort()
        else:
            self._watch()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
