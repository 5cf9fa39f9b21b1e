"""POST /v1/completions."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from router.openai.params import completion_job, timeout_s
from router.openai.schemas import CompletionRequest
from router.openai.serving import GenerationResponse, Serving

PATH = "/v1/completions"


async def completions(request: Request) -> Response:
    """Validate and tokenize; the response runs the rest."""
    serving: Serving = request.app.state.serving
    body = await serving.reader.read(request, CompletionRequest)
    serving.check_model(body.model)
    serving.lifecycle.check_open()
    limit_s = timeout_s(
        body.timeout_ms,
        request.headers.get("x-request-timeout-ms"),
        serving.settings.http.request_timeout_s,
    )
    build = partial(completion_job, body, serving.settings, serving.limits(), limit_s)
    return GenerationResponse(serving, await serving.in_thread(build), PATH)
