"""Which request the running code works for: request id and W3C trace context, carried in one context variable.

Servers set it per call (`k3/rpc/server.py`, the router's middleware), clients pass it on as gRPC metadata
(`outgoing`), logs read it. Nothing is exported from here.
"""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

REQUEST_ID_KEY, TRACEPARENT_KEY, TRACESTATE_KEY = "x-request-id", "traceparent", "tracestate"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_TRACESTATE = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """One span's identity: 32 and 16 hexadecimal digits, flags, and the vendors' list."""

    trace_id: str
    span_id: str
    flags: int = 0
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The header value, version 00."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    def child(self) -> Trace:
        """A new span of the same trace."""
        return replace(self, span_id=secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class Scope:
    """What running code works for."""

    request_id: str
    trace: Trace


_scope: ContextVar[Scope | None] = ContextVar("k3_scope", default=None)


def current() -> Scope | None:
    """The scope of the running task, or None outside a request."""
    return _scope.get()


@contextmanager
def scope(value: Scope) -> Generator[Scope]:
    """Set the scope for the running task and the tasks it starts."""
    token = _scope.set(value)
    try:
        yield value
    finally:
        _scope.reset(token)


def parse_trace(traceparent: str, tracestate: str = "") -> Trace | None:
    """Trace of a header; None when it is malformed (it is ignored then, as the standard demands)."""
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    is_zero = set(trace_id) == {"0"} or set(span_id) == {"0"}
    if is_zero or version == "ff" or (version == "00" and rest is not None):
        return None
    return Trace(trace_id, span_id, int(flags, 16), tracestate[:_MAX_TRACESTATE])


def new_trace() -> Trace:
    """A trace that starts here, not sampled."""
    return Trace(secrets.token_hex(16), secrets.token_hex(8))


def incoming(headers: Mapping[str, str]) -> Scope:
    """The scope of a call, from lower-case header or metadata names; missing or bad parts are made new."""
    request_id = headers.get(REQUEST_ID_KEY, "")
    if not REQUEST_ID.fullmatch(request_id):
        request_id = f"req-{uuid.uuid4().hex}"
    parent = parse_trace(headers.get(TRACEPARENT_KEY, ""), headers.get(TRACESTATE_KEY, ""))
    return Scope(request_id, parent.child() if parent else new_trace())


def outgoing(value: Scope | None = None) -> tuple[tuple[str, str], ...]:
    """gRPC metadata for a call made on behalf of `value` (default: the running scope); empty outside a request."""
    value = value or current()
    if value is None:
        return ()
    metadata = [(REQUEST_ID_KEY, value.request_id), (TRACEPARENT_KEY, value.trace.traceparent)]
    if value.trace.state:
        metadata.append((TRACESTATE_KEY, value.trace.state))
    return tuple(metadata)
