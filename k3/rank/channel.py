"""Framed protobuf between a front and its ranks, over a Unix socket or TCP.

A frame is a 4-byte big-endian length and one serialised message; both ends know its type from the protocol
(`proto/k3/v1/plan.proto`), so no type travels. Two ends: `AsyncChannel` for fronts, `BlockingChannel` for ranks.
End of file is a death notice and raises EOFError; a frame beyond MAX_FRAME_BYTES, or one that does not parse,
raises ConnectionError, after which the connection is useless. Never anything but protobuf crosses it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from k3.errors import ConfigError

M = TypeVar("M", bound=Message)

MAX_FRAME_BYTES = 32 << 20
READ_BYTES = 1 << 16
LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket of this machine: in the file system, or with a leading NUL in Linux' abstract names.

    An abstract name vanishes with its last socket, so not even a killed process leaves anything behind.
    """

    path: str

    def __str__(self) -> str:
        return "unix:" + self.path.replace("\0", "@", 1)


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A port of a host."""

    host: str
    port: int


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """`unix:/path`, `unix:@abstract-name` or `tcp:host:port`. Raises ConfigError."""
    scheme, _colon, rest = text.partition(":")
    if scheme == "unix" and rest.startswith("/"):
        return UnixAddress(rest)
    if scheme == "unix" and rest.startswith("@") and len(rest) > 1:
        return UnixAddress("\0" + rest[1:])
    host, _colon, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdigit() and 0 < int(port) < 65536:
        return TcpAddress(host.strip("[]"), int(port))
    raise ConfigError(f"front address {text!r}: expected unix:/path, unix:@name or tcp:host:port")


def encode(message: Message) -> bytes:
    """The frame of a message. Raises ConnectionError when it is too big to send."""
    payload = message.SerializeToString()
    _check_length(len(payload), type(message).__name__)
    return LENGTH.pack(len(payload)) + payload


def _check_length(n_bytes: int, what: str) -> None:
    if n_bytes > MAX_FRAME_BYTES:
        raise ConnectionError(
            f"frame of {n_bytes} bytes ({what}): the limit is {MAX_FRAME_BYTES}; either the peer is not a "
            "k3-serving process, or the message must be split"
        )


def _decode(payload: bytes, kind: type[M]) -> M:
    message = kind()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise ConnectionError(
            f"frame of {len(payload)} bytes is not a {kind.__name__}: {error}"
        ) from error
    return message


class AsyncChannel:
    """The front's end. One task reads, any task may send; frames are never interleaved."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, message: Message, deadline_s: float) -> None:
        """Queue one frame and wait while too much is queued.

        Raises OSError when the peer is gone, TimeoutError when it has not read for `deadline_s`.
        """
        self._writer.write(encode(message))
        if self._writer.transport.get_write_buffer_size() > 0:
            async with asyncio.timeout(deadline_s):
                await self._writer.drain()

    async def receive(self, kind: type[M]) -> M:
        """Wait for the next frame. Raises EOFError at the end, ConnectionError for a bad frame."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            _check_length(length, kind.__name__)
            payload = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionResetError) as error:
            raise EOFError("the peer closed the connection") from error
        return _decode(payload, kind)

    def close(self) -> None:
        """Close at once; what is queued may be lost. Idempotent."""
        self._writer.close()


async def listen(
    address: Address, on_channel: Callable[[AsyncChannel], Awaitable[None]]
) -> asyncio.Server:
    """Accept connections; `on_channel` runs as a task of its own for each of them."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await on_channel(AsyncChannel(reader, writer))

    match address:
        case UnixAddress(path):
            return await asyncio.start_unix_server(accept, path)
        case TcpAddress(host, port):
            return await asyncio.start_server(accept, host, port)


class BlockingChannel:
    """A rank's end; used by one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    @classmethod
    def connect(cls, address: Address, deadline_s: float) -> BlockingChannel:
        """Dial until it works. Raises the last OSError when `deadline_s` has passed."""
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                return cls(_dial(address, deadline_s))
            except (ConnectionRefusedError, FileNotFoundError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def fileno(self) -> int:
        """For `select.poll`."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one frame. Raises OSError when the peer is gone."""
        self._socket.sendall(encode(message))

    def receive(self, kind: type[M]) -> M:
        """Wait for the next frame, without limit: a front may be silent for days. Raises EOFError."""
        while (message := self._take(kind)) is None:
            self._fill(0)
        return message

    def receive_ready(self, kind: type[M]) -> list[M]:
        """Frames that are already here, without waiting. Raises EOFError when the peer has closed."""
        messages: list[M] = []
        while True:
            while (message := self._take(kind)) is not None:
                messages.append(message)
            try:
                self._fill(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except EOFError:
                if messages:
                    return messages
                raise

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    def _fill(self, flags: int) -> None:
        try:
            data = self._socket.recv(READ_BYTES, flags)
        except ConnectionResetError as error:
            raise EOFError("the front closed the connection") from error
        if not data:
            raise EOFError("the front closed the connection")
        self._buffer += data

    def _take(self, kind: type[M]) -> M | None:
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        _check_length(length, kind.__name__)
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return _decode(payload, kind)


def _dial(address: Address, timeout_s: float) -> socket.socket:
    match address:
        case UnixAddress(path):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(path)
            except OSError:
                sock.close()
                raise
        case TcpAddress(host, port):
            sock = socket.create_connection((host, port), timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(None)
    return sock
