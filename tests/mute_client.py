"""A gRPC client that lives, acknowledges and answers pings, and takes not one byte of an answer.

HTTP/2 by hand: its windows are 0, so the first message of every call waits in flow control for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf.message import Message

DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACK = END_STREAM = 1
END_HEADERS = 4
NO_WINDOW = b"\x00\x04\x00\x00\x00\x00"  # SETTINGS_INITIAL_WINDOW_SIZE = 0


class MuteClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._next_stream = 1
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, NO_WINDOW))

    def call(self, path: str, *messages: Message) -> None:
        """Begin a call, say the messages, and leave it half open."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._writer.write(frame(HEADERS, END_HEADERS, stream, headers(path)))
        for message in messages:
            body = message.SerializeToString()
            data = b"\x00" + len(body).to_bytes(4, "big") + body
            self._writer.write(frame(DATA, 0, stream, data))

    async def live(self) -> None:
        """Keep the connection until it is closed."""
        while True:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] in (SETTINGS, PING) and not head[4] & ACK:
                answer = payload if head[3] == PING else b""
                self._writer.write(frame(head[3], ACK, 0, answer))


@asynccontextmanager
async def mute_client(address: str) -> AsyncIterator[MuteClient]:
    """A connected client that lives until the end of the block."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    client = MuteClient(reader, writer)
    life = asyncio.create_task(client.live())
    try:
        yield client
        assert not life.done(), "the server closed the connection"
    finally:
        life.cancel()
        writer.close()
        await asyncio.gather(life, return_exceptions=True)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


def headers(path: str) -> bytes:
    """A request's head without compression: literal fields, no index (RFC 7541, 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(b"\x00" + literal(name) + literal(value) for name, value in fields.items())


def literal(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()
