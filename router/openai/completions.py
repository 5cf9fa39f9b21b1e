"""POST /v1/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.openai.params import completion_job
from router.openai.schemas import CompletionRequest
from router.openai.serving import generate

PATH = "/v1/completions"


async def completions(request: Request) -> Response:
    """Validate and tokenize; the response runs the rest."""
    return await generate(request, CompletionRequest, completion_job, PATH)
