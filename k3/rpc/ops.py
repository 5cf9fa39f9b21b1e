"""The ops port of an engine: a tiny ASGI application for probes and scrapes, served by uvicorn in the engine's loop.

GET and HEAD only: /health, /ready, /startup, /version (JSON), /metrics (Prometheus, or OpenMetrics by Accept), the
aliases /ping /livez /healthz /readyz, and pages of the service's own. It knows nothing of engines: what it shows comes
from `OpsSource` and from the pages.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl

import uvicorn
from prometheus_client import CollectorRegistry
from uvicorn.protocols.http.h11_impl import H11Protocol

from k3.rpc.unread import BoundedConnection
from k3.telemetry.declare import encode

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ALIASES = {"/ping": "/health", "/livez": "/health", "/healthz": "/health", "/readyz": "/ready"}
JSON_TYPE = "application/json"


class Answer(NamedTuple):
    """Status and JSON body of a probe."""

    status: int
    body: dict[str, object]


Page = Callable[[Mapping[str, str]], Answer]  # of the query


class OpsSource(Protocol):
    """What the probes show."""

    def health(self) -> Answer:
        """200 while loops make progress; 503 when stalled or lost."""
        ...

    def ready(self) -> Answer:
        """200 while new requests are taken; else 503 with reasons."""
        ...

    def startup(self) -> Answer:
        """200 once the model is loaded and warm, for ever after."""
        ...

    def version(self) -> Answer:
        """Versions and fingerprints."""
        ...

    def refresh(self) -> CollectorRegistry:
        """The registry to scrape, gauges up to date."""
        ...


class OpsApp:
    """The ASGI application."""

    def __init__(self, source: OpsSource, pages: Mapping[str, Page]) -> None:
        """pages: what else is served, by path."""
        self._source = source
        self._pages = dict(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; anything but HTTP is ignored (lifespan is off)."""
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        status, kind, body = self._answer(
            scope["method"], scope["path"], query, headers.get(b"accept", b"").decode("latin-1")
        )
        head = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        if status == 405:
            head.append((b"allow", b"GET, HEAD"))
        await send({"type": "http.response.start", "status": status, "headers": head})
        shown = b"" if scope["method"] == "HEAD" else body
        await send({"type": "http.response.body", "body": shown})

    def _answer(
        self, method: str, path: str, query: Mapping[str, str], accept: str
    ) -> tuple[int, str, bytes]:
        path = ALIASES.get(path, path)
        probes = {
            "/health": self._source.health,
            "/ready": self._source.ready,
            "/startup": self._source.startup,
            "/version": self._source.version,
        }
        if path not in probes and path not in self._pages and path != "/metrics":
            known = ", ".join((*probes, *self._pages))
            return _encoded(problem(404, "not_found", f"no such path; try {known} or /metrics"))
        if method not in ("GET", "HEAD"):
            wrong = f"{method} is not allowed here; use GET"
            return _encoded(problem(405, "method_not_allowed", wrong))
        if path == "/metrics":
            body, kind = encode(self._source.refresh(), accept)
            return 200, kind, body
        answer = probes[path]() if path in probes else self._pages[path](query)
        return _encoded(answer)


def problem(status: int, code: str, message: str) -> Answer:
    """An error in the shape all our HTTP ports share."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return Answer(status, {"error": error})


def _encoded(answer: Answer) -> tuple[int, str, bytes]:
    return answer.status, JSON_TYPE, json.dumps(answer.body).encode()


class _Connection(BoundedConnection, H11Protocol): ...


class OpsServer(uvicorn.Server):
    """uvicorn in a loop and a process that belong to somebody else: it installs no signal handlers."""

    def __init__(self, source: OpsSource, sock: socket.socket, pages: Mapping[str, Page]) -> None:
        super().__init__(
            uvicorn.Config(
                OpsApp(source, pages),
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
                ws="none",
                http=_Connection,
                server_header=False,
            )
        )
        self._sock = sock

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals alone."""
        yield

    async def run_until_stopped(self) -> None:
        """Serve until `stop` is called; closes the socket."""
        await self.serve(sockets=[self._sock])

    def stop(self) -> None:
        """Let `run_until_stopped` return."""
        self.should_exit = True
