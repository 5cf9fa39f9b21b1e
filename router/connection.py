"""One client connection: uvicorn's protocol with bounds on a peer that sends too much, too slowly, or reads nothing.

The parser takes heads of any length at any pace. Here a head may have MAX_HEAD_BYTES and HEAD_S seconds, and what is
not HTTP is answered with an error object like every other fault. Bodies are bounded where they are read
(`router/openai/body.py`), a client that reads nothing in `k3/rpc/unread.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from k3.rpc.unread import BoundedConnection
from router.openai.errors import ApiError

if TYPE_CHECKING:
    import httptools

MAX_HEAD_BYTES = 64 << 10
HEAD_S = 30.0


class Connection(BoundedConnection, HttpToolsProtocol):
    """`_in_head`: the next bytes belong to the head of a request."""

    parser: httptools.HttpRequestParser | None
    cycle: RequestResponseCycle | None  # type: ignore[assignment]  # None before the first request

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._n_heads = 0
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited from now on."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, then judge an unfinished head: at most one read of 256 KiB is taken beyond the limit."""
        was_in_head, n_heads = self._in_head, self._n_heads
        super().data_received(data)
        if self.parser is None or self.transport.is_closing() or not self._in_head:
            return
        if was_in_head and self._n_heads == n_heads:
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the request's head is longer than {MAX_HEAD_BYTES} bytes")
        elif self._is_idle():
            self._await_head()

    def on_headers_complete(self) -> None:
        """The head is over."""
        self._in_head, self._head_bytes = False, 0
        self._n_heads += 1
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """What comes next is a head again."""
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Not HTTP."""
        self._refuse(400, msg)

    def _is_idle(self) -> bool:
        """Whether no request is being answered; the keep-alive timer starts after an answer."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def _give_up(self) -> None:
        self._head_timer = None
        self._refuse(408, f"the request's head did not arrive within {HEAD_S:g} s")

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close, unless an answer is being written: then only close."""
        if self._is_idle():
            body = orjson.dumps(ApiError(status, message, "invalid_http").body)
            head = (
                f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
}
