"""Outgoing gRPC channels: one per peer address, with our keepalive, and the metadata every call carries.

Retries are off in the channel: the router and decode decide what is tried again. A channel is made without
dialling; `ready` waits for the connection within a deadline.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from k3.errors import Unavailable
from k3.telemetry.tracing import Scope, outgoing

MAX_MESSAGE_BYTES = 64 << 20  # prompts of a million ids fit; tensors never travel over gRPC
CONNECT_TIMEOUT_S = 2.0
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Without it a peer that is stopped, but whose kernel still acknowledges, is not noticed for minutes.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files: trusted authorities, and our certificate with its key where the peer demands one."""

    ca: str
    cert: str = ""
    key: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises OSError."""
        pair = (Path(self.key), Path(self.cert)) if self.cert else (None, None)
        key, cert = (path.read_bytes() if path else None for path in pair)
        return grpc.ssl_channel_credentials(Path(self.ca).read_bytes(), key, cert)


def client_tls(ca: str, cert: str, key: str) -> ClientTls | None:
    """TLS of outgoing channels from three settings; None when no authority is set: no TLS."""
    return ClientTls(ca, cert, key) if ca else None


class ChannelPool:
    """One channel per address, made on first use. Owns them: `close` ends all calls on them.

    connect_timeout_s: limit of one dial.
    """

    def __init__(
        self, tls: ClientTls | None = None, connect_timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        self._tls = tls
        dial = ("grpc.min_reconnect_backoff_ms", max(1, round(connect_timeout_s * 1000)))
        self._options = (*OPTIONS, dial)  # gRPC's name for it
        self._channels: dict[str, grpc.aio.Channel] = {}

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to `address` (host:port); does not dial. Raises OSError when a TLS file is unreadable."""
        if address not in self._channels:
            self._channels[address] = (
                grpc.aio.insecure_channel(address, self._options)
                if self._tls is None
                else grpc.aio.secure_channel(address, self._tls.credentials(), self._options)
            )
        return self._channels[address]

    async def ready(self, address: str, timeout_s: float) -> grpc.aio.Channel:
        """The connected channel. Raises Unavailable when there is no connection within `timeout_s`."""
        channel = self.channel(address)
        try:
            async with asyncio.timeout(timeout_s):
                await channel.channel_ready()
        except TimeoutError as error:
            raise Unavailable(
                f"no connection to {address} within {timeout_s:g} s; check that an instance listens there"
            ) from error
        return channel

    async def drop(self, address: str) -> None:
        """Close the channel to `address`, if there is one; calls on it end with CANCELLED."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Close every channel."""
        while self._channels:
            await self.drop(next(iter(self._channels)))


def call_metadata(scope: Scope | None = None) -> tuple[tuple[str, str], ...]:
    """Metadata of a call: request id and trace context of `scope`, default the running request's."""
    return outgoing(scope)
