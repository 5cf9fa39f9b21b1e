"""Assembly of the two HTTP applications, and what every response has in common.

`Edge` is the outermost layer of both: request id and trace scope, HEAD, counting, and the last resort for bugs. Errors
of every kind, FastAPI's own included, leave as OpenAI error objects.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from k3.errors import K3Error
from k3.telemetry import tracing
from k3.telemetry.metrics import RouterMetrics
from router.admin import Admin
from router.auth import KeyGate, Keys
from router.openai import chat, completions
from router.openai.errors import ApiError, api_error
from router.openai.models import (
    detokenize,
    get_model,
    json_response,
    list_models,
    tokenize,
    tokenizer_info,
)
from router.openai.schemas import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from router.openai.serving import Serving
from router.openai.sse import send_json
from router.openapi import add_schemas, get_extra, post_extra
from router.ops import OPS_ROUTES

log = logging.getLogger("k3.router")
POST_ROUTES: tuple[tuple[str, Any, type[Body]], ...] = (
    (chat.PATH, chat.chat_completions, ChatRequest),
    (completions.PATH, completions.completions, CompletionRequest),
    ("/tokenize", tokenize, TokenizeRequest),
    ("/detokenize", detokenize, DetokenizeRequest),
)


STREAMING = (chat.PATH, completions.PATH)
GET_ROUTES: Mapping[str, Any] = {
    "/v1/models": list_models,
    "/tokenizer_info": tokenizer_info,
    **OPS_ROUTES,
}


def public_app(serving: Serving, keys: Keys) -> ASGIApp:
    """The public API. keys: who may use it; health, readiness and version are open to all."""
    app = _bare_app("k3-serving", serving)
    for path, handler, body in POST_ROUTES:
        extra = post_extra(body, streams=path in STREAMING)
        app.add_api_route(path, handler, methods=["POST"], openapi_extra=extra)
    for path, handler in GET_ROUTES.items():
        kind = PlainTextResponse if path == "/metrics" else JSONResponse
        extra = get_extra()
        app.add_api_route(path, handler, methods=["GET"], response_class=kind, openapi_extra=extra)
    path, extra = "/v1/models/{model_id}", get_extra("model_id")
    app.add_api_route(path, get_model, methods=["GET"], openapi_extra=extra)
    add_schemas(app, [body for _, _, body in POST_ROUTES])
    guarded = {"/metrics"} if serving.settings.http.metrics_auth else set[str]()
    inner: ASGIApp = KeyGate(app, keys, serving.count_error, OPS_ROUTES.keys() - guarded)
    if serving.settings.http.cors_origins:
        inner = CORSMiddleware(
            inner,
            allow_origins=serving.settings.http.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Seed", "Server-Timing"],
        )
    return Edge(inner, serving.metrics, [*GET_ROUTES, *(path for path, _, _ in POST_ROUTES)])


def admin_app(serving: Serving, admin: Admin, keys: Keys) -> ASGIApp:
    """The admin API. keys: of its own, not the public ones."""
    app = _bare_app("k3-serving admin", serving)
    admin.add_routes(app)
    return Edge(KeyGate(app, keys, serving.count_error), serving.metrics, [])


def _bare_app(title: str, serving: Serving) -> FastAPI:
    app = FastAPI(title=title, version=serving.version, docs_url=None, redoc_url=None)
    app.state.serving = serving
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(K3Error, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_error)  # a bug; raised on to `Edge`, which logs it
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    shown = api_error(error)
    request.app.state.serving.count_error(shown.code)
    response = json_response(shown.body, shown.status)
    response.headers.update(shown.headers)
    return response


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the routing itself."""
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = {
        404: f"{request.url.path} is not served here; GET /openapi.json lists what is",
        405: f"{request.method} is not allowed on {request.url.path}",
    }.get(error.status_code, str(error.detail))
    code = codes.get(error.status_code, "invalid_value")
    return await _on_error(
        request, ApiError(error.status_code, message, code, None, error.headers or {})
    )


class Edge:
    """Outermost layer. known_paths: what metrics may name; everything else is `other`."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics, known_paths: Iterable[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._known = frozenset(known_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or pass on what is no request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        started, method = time.monotonic(), scope["method"]
        with tracing.scope(tracing.incoming(headers)) as running:
            exchange = _Exchange(send, running.request_id, is_head=method == "HEAD")
            inner = {**scope, "method": "GET"} if method == "HEAD" else scope
            try:
                await self._app(inner, receive, exchange.send)
            except Exception as error:  # the outermost loop of a request: log, answer, go on
                log.error("request failed by a bug", exc_info=error)
                if exchange.status is None:
                    shown = api_error(error)
                    await send_json(exchange.send, shown.status, shown.body, shown.headers)
        path = scope["path"] if scope["path"] in self._known else "other"
        code = str(exchange.status or 499)
        self._metrics.http_requests.labels(path, _known_method(method), code).inc()
        self._metrics.http_s.labels(path).observe(time.monotonic() - started)


class _Exchange:
    """Adds the request id to a response, remembers its status, drops the body of a HEAD answer."""

    def __init__(self, send: Send, request_id: str, *, is_head: bool) -> None:
        self._send = send
        self._request_id = request_id
        self._is_head = is_head
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._request_id.encode())]
            message = {**message, "headers": headers}
        elif self._is_head:
            message = {**message, "body": b""}
        await self._send(message)


def _known_method(method: str) -> str:
    known = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
    return method if method in known else "other"
