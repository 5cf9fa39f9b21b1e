"""A client that sends a request and leaves without reading: one socket, closed when the test says so."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit


class Abandoned:
    """Open on construction; `leave` closes the connection, which is all a server ever learns."""

    def __init__(self, url: str, prompt: list[int], *, max_tokens: int = 16) -> None:
        where = urlsplit(url)
        body = json.dumps(
            {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\n"
            f"Host: {where.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._socket = socket.create_connection((where.hostname or "", where.port or 0), 10)
        self._socket.sendall(head.encode() + body)

    def leave(self) -> None:
        """Go away."""
        self._socket.close()
