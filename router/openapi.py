"""What /openapi.json says beyond what FastAPI sees: bodies are read by us, errors have one shape, streams exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.openai.schemas import ErrorBody

Json = dict[str, Any]
SCHEMAS = "#/components/schemas/{model}"


def get_extra(*path_parameters: str) -> Json:
    """Of an operation without a body."""
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in path_parameters
    ]
    return {"responses": _errors(), "parameters": parameters}


def post_extra(body: type[BaseModel], *, streams: bool) -> Json:
    """Of an operation with a JSON body; `streams`: the answer may be server-sent events."""
    responses = _errors()
    if streams:
        content: Json = {"text/event-stream": {}}
        responses["200"] = {"description": "The answer, whole or as events", "content": content}
    return {
        "requestBody": {"required": True, "content": _json(body)},
        "responses": responses,
    }


def add_schemas(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Put the schemas of the bodies and of errors into the document of `app`."""
    plain = app.openapi

    def openapi() -> Json:
        document = plain()
        _, definitions = models_json_schema(
            [*((body, "validation") for body in bodies), (ErrorBody, "serialization")],
            ref_template=SCHEMAS,
        )
        components = document.setdefault("components", {})
        components.setdefault("schemas", {}).update(definitions["$defs"])
        return document

    app.openapi = openapi


def _errors() -> Json:
    return {"default": {"description": "An error object", "content": _json(ErrorBody)}}


def _json(model: type[BaseModel]) -> Json:
    return {"application/json": {"schema": {"$ref": SCHEMAS.format(model=model.__name__)}}}
