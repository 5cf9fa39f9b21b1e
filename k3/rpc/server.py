"""The gRPC server of an engine: options, TLS, ports, and one interceptor around every call.

The interceptor sets the request's scope (id, trace) for logs and further calls, refuses calls whose deadline has
passed, bounds the wait for a caller that does not read (`unread.py`), and turns exceptions into statuses by the table
of `status.py`. Health and reflection are added in `engine.py`.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from k3.config.tree import ServeConfig
from k3.errors import ConfigError, DeadlineExceeded, K3Error, PortInUse, RequestRejected
from k3.rpc.client import MAX_MESSAGE_BYTES
from k3.rpc.status import INTERNAL, status_of, to_grpc, trailing_metadata
from k3.rpc.unread import CALL_S, BoundedContext
from k3.telemetry import tracing

log = logging.getLogger("k3.rpc")

Context = grpc.aio.ServicerContext[Any, Any]
EXTRA_STREAMS = 64  # Watch, health and operators' calls beside requests


def options(n_requests: int) -> tuple[tuple[str, int], ...]:
    """Server options; `n_requests` = requests that may be open at once."""
    return (
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", n_requests + EXTRA_STREAMS),
        ("grpc.so_reuseport", 0),  # a taken port must fail, not be shared
    )


def make_server(n_requests: int, unread_s: float = CALL_S) -> grpc.aio.Server:
    """A server without ports and services. unread_s: for a caller to read one message of a stream."""
    return grpc.aio.server(interceptors=[CallFrame(unread_s)], options=options(n_requests))


def bind(server: grpc.aio.Server, serve: ServeConfig) -> int:
    """Add the port of the configuration, with TLS when it names a certificate; returns the port.

    Raises PortInUse naming a free port, ConfigError for a host or a certificate that cannot be used.
    """
    check_port(serve.host, serve.port, "serve.port")
    address = f"{serve.host}:{serve.port}"
    try:
        if serve.tls_cert:
            return server.add_secure_port(address, _Certificates(serve).credentials())
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(
            f"serve.host, serve.port, serve.tls_*: gRPC cannot listen on {address}: {error}; "
            "see its own lines above"
        ) from error


def check_port(host: str, port: int, setting: str) -> None:
    """Raise PortInUse, naming a free port, or ConfigError when `port` cannot be bound on `host`."""
    try:
        bound_socket(host, port).close()
    except OSError as error:
        where = f"{setting}={port}: cannot listen on {host}:{port} ({error.strerror})"
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(
                f"{where}; give an address of this machine and a port above 1023"
            ) from error
        free = bound_socket(host, 0)
        suggestion = free.getsockname()[1]
        free.close()
        raise PortInUse(f"{where}; {suggestion} is free, for example") from error


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening-ready TCP socket; raises OSError."""
    name = host.strip("[]")
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    # asyncio turns Nagle's delay off only for sockets that name their protocol.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((name, port))
    except OSError:
        sock.close()
        raise
    return sock


class _Certificates:
    """TLS files, read again for new connections after they change on disk. Raises OSError at first."""

    def __init__(self, serve: ServeConfig) -> None:
        self._key, self._cert = Path(serve.tls_key), Path(serve.tls_cert)
        self._ca = Path(serve.tls_ca) if serve.tls_ca else None
        self._client_auth = serve.tls_client_auth
        self._stamp: tuple[int, ...] = self._stamps()
        self._current = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that follow the files."""
        return grpc.dynamic_ssl_server_credentials(
            self._current, self._renewed, require_client_authentication=self._client_auth
        )

    def _read(self) -> grpc.ServerCertificateConfiguration:
        pair = [(self._key.read_bytes(), self._cert.read_bytes())]
        root = self._ca.read_bytes() if self._ca else None
        return grpc.ssl_server_certificate_configuration(pair, root_certificates=root)

    def _stamps(self) -> tuple[int, ...]:
        files = [f for f in (self._key, self._cert, self._ca) if f is not None]
        return tuple(f.stat().st_mtime_ns for f in files)

    def _renewed(self) -> grpc.ServerCertificateConfiguration:
        """Called by gRPC per handshake; what is there stays while files are being replaced."""
        try:
            stamp = self._stamps()
            if stamp != self._stamp:
                self._current, self._stamp = self._read(), stamp
        except OSError as error:
            log.warning("TLS files unreadable, keeping the old ones", extra={"error": str(error)})
        return self._current


class CallFrame(grpc.aio.ServerInterceptor):
    """What surrounds every call: scope, deadline, readers that do not read, errors."""

    def __init__(self, unread_s: float) -> None:
        self._unread_s = unread_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of the call; unknown methods pass through."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        read = _reader(handler.request_deserializer)
        # A single request is read inside the frame, as those of a stream are: what that raises is the call's end.
        within, without = (None, read) if handler.request_streaming else (read, None)
        frame = _Frame(str(handler_call_details.method), self._unread_s, within)
        match handler.request_streaming, handler.response_streaming:
            case False, False:
                make, wrapped = (
                    grpc.unary_unary_rpc_method_handler,
                    frame.unary(handler.unary_unary),
                )
            case False, True:
                make, wrapped = (
                    grpc.unary_stream_rpc_method_handler,
                    frame.stream(handler.unary_stream),
                )
            case True, False:
                make, wrapped = (
                    grpc.stream_unary_rpc_method_handler,
                    frame.unary(handler.stream_unary),
                )
            case _:
                make, wrapped = (
                    grpc.stream_stream_rpc_method_handler,
                    frame.stream(handler.stream_stream),
                )
        return make(wrapped, without, handler.response_serializer)


def _reader(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """As `deserializer`; raises RequestRejected for bytes that are no message."""

    def read(raw: bytes) -> Any:
        try:
            return deserializer(raw)
        except DecodeError as error:
            text = f"{len(raw)} bytes that are no message of this method; build it from proto/k3/v1"
            raise RequestRejected(text, code="invalid_message") from error

    return read


def _as_it_is(request: Any) -> Any:
    return request


class _Frame:
    """The frame of one method. read: makes a message of its single request; None where that is done already."""

    def __init__(self, method: str, unread_s: float, read: Callable[[bytes], Any] | None) -> None:
        self._method = method
        self._unread_s = unread_s
        self._read = read or _as_it_is

    def unary(
        self, inner: Callable[[Any, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        """A handler with one answer."""

        async def handle(request: Any, context: Context) -> Any:
            return await self._run(context, lambda: inner(self._read(request), context))

        return handle

    def stream(self, inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Awaitable[None]]:
        """A handler with many answers: an async generator, or a coroutine that calls `context.write`."""

        async def send(request: Any, context: BoundedContext) -> None:
            answers = inner(self._read(request), context)
            if not inspect.isasyncgen(answers):
                await answers
                return
            async with aclosing(answers):
                async for answer in answers:
                    await context.write(answer)

        async def handle(request: Any, context: Context) -> None:
            bounded = BoundedContext(context, self._unread_s)
            await self._run(context, lambda: send(request, bounded))

        return handle

    async def _run(self, context: Context, work: Callable[[], Awaitable[Any]]) -> Any:
        metadata = {str(k): v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
        with tracing.scope(tracing.incoming(metadata)):
            try:
                remaining_s = cast("float | None", context.time_remaining())
                if remaining_s is not None and remaining_s <= 0:
                    raise DeadlineExceeded(
                        f"{self._method}: the call's deadline had passed on arrival"
                    )
                return await work()
            except grpc.aio.AbortError:
                raise
            except (K3Error, TimeoutError) as error:
                level = logging.ERROR if status_of(error) is INTERNAL else logging.DEBUG
                log.log(level, "call failed", extra={"method": self._method, "error": str(error)})
                await self._abort(context, error)
            except (
                Exception
            ) as error:  # outermost frame of a call: gRPC would send the text to the peer
                log.exception("call failed with a bug", extra={"method": self._method})
                await self._abort(context, error)

    async def _abort(self, context: Context, error: Exception) -> None:
        """Say how the call ended. The status of a stream waits behind what was not read, and stays on its way."""
        status, details = to_grpc(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._unread_s):
                await context.abort(status, details, trailing_metadata(error))
