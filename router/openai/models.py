"""GET /v1/models and the tokenizer endpoints: what is served, and its tokens."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from k3.errors import RequestRejected
from router.openai.answer import token_text
from router.openai.errors import model_not_found
from router.openai.prompts import tokenize_ids
from router.openai.schemas import DetokenizeRequest, TokenizeRequest
from router.openai.serving import Serving


def json_response(body: Any, status: int = 200) -> Response:
    """JSON by orjson."""
    return Response(orjson.dumps(body), status, media_type="application/json")


async def list_models(request: Request) -> Response:
    """Models that somebody serves."""
    serving: Serving = request.app.state.serving
    live = serving.registry.live_decode() is not None
    return json_response({"object": "list", "data": [_model(serving)] if live else []})


async def get_model(request: Request) -> Response:
    """One model; 404 for names that are not served here."""
    serving: Serving = request.app.state.serving
    name = request.path_params["model_id"]
    if name != serving.folder.name:
        raise model_not_found(name)
    return json_response(_model(serving))


async def tokenize(request: Request) -> Response:
    """Ids of a prompt or of rendered messages."""
    serving: Serving = request.app.state.serving
    body = await serving.reader.read(request, TokenizeRequest)
    serving.check_model(body.model)
    tokenizer, max_model_len = serving.folder.tokenizer, serving.limits().max_model_len

    def answer() -> Response:
        ids = tokenize_ids(body, serving.folder)
        texts = (
            [token_text(tokenizer.token_bytes(i)) for i in ids] if body.return_token_strs else None
        )
        return json_response(
            {
                "tokens": ids,
                "count": len(ids),
                "max_model_len": max_model_len,
                "token_strs": texts,
            }
        )

    return await serving.in_thread(answer)


async def detokenize(request: Request) -> Response:
    """Text of ids."""
    serving: Serving = request.app.state.serving
    body = await serving.reader.read(request, DetokenizeRequest)
    serving.check_model(body.model)
    tokenizer = serving.folder.tokenizer
    wrong = next((token for token in body.tokens if token >= tokenizer.vocab_size), None)
    if wrong is not None:
        raise RequestRejected(
            f"tokens: id {wrong} is outside 0..{tokenizer.vocab_size - 1}", param="tokens"
        )
    skips = body.skip_special_tokens is not False

    def answer() -> Response:
        return json_response({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=skips)})

    return await serving.in_thread(answer)


async def tokenizer_info(request: Request) -> Response:
    """Facts of the tokenizer that clients ask for."""
    folder = request.app.state.serving.folder
    control, tokenizer = folder.chat_format.control, folder.tokenizer
    return json_response(
        {
            "model": folder.name,
            "tokenizer_class": "k3",
            "vocab_size": tokenizer.vocab_size,
            "n_ordinary_tokens": tokenizer.base,
            "bos_token": folder.chat_format.control_text["bos"],
            "eos_token": folder.chat_format.control_text["end_of_msg"],
            "pad_token": folder.chat_format.control_text["pad"],
            "bos_token_id": control.bos,
            "eos_token_id": control.end_of_msg,
            "pad_token_id": control.pad,
            "eos_token_ids": list(folder.eos_token_ids),
            "special_tokens": dict(tokenizer.specials),
            "model_max_length": folder.max_model_len,
        }
    )


def _model(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.folder.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "k3-serving",
        "max_model_len": serving.limits().max_model_len,
        "root": serving.folder.name,
        "parent": None,
    }
