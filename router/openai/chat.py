"""POST /v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.openai.params import chat_job
from router.openai.schemas import ChatRequest
from router.openai.serving import generate

PATH = "/v1/chat/completions"


async def chat_completions(request: Request) -> Response:
    """Validate, render, tokenize; the response runs the rest."""
    return await generate(request, ChatRequest, chat_job, PATH)
