"""Request bodies: bytes to a checked model, with errors that name the field.

orjson refuses NaN and lone surrogates; pydantic checks types and ranges; its complaints become 400 with `param` as a
dotted path. FastAPI's own parsing (and its 422) is not used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from k3.errors import QueueFull, RequestRejected
from router.openai.errors import ApiError
from router.openai.schemas import Body

B = TypeVar("B", bound=Body)
BODY_S = 60.0  # for a whole body to arrive
ARRIVING = 8  # bodies of the largest size
TYPE_ERRORS = ("_type", "_parsing", "_attributes")


class BodyReader:
    """Reads bodies of one router. on_unknown(field) counts fields nobody knows.

    Of bodies that are still arriving it holds no more than ARRIVING of the largest have bytes.
    """

    def __init__(
        self, max_bytes: int, on_unknown: Callable[[str], None], *, refuse_unknown: bool
    ) -> None:
        self._max_bytes = max_bytes
        self._room = ARRIVING * max_bytes
        self._on_unknown = on_unknown
        self._refuse_unknown = refuse_unknown

    async def read(self, request: Request, model: type[B], *, always: bool = False) -> B:
        """The body as `model`. Raises ApiError (413, 415), RequestRejected, or QueueFull where it has no room.

        always: for operators, who are let in whatever is arriving.
        """
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        raw = await self._bytes(request, always=always)
        if kind != "application/json" and not (
            kind.startswith("application/") and kind.endswith("+json")
        ):
            raise ApiError(
                415,
                f"content type {kind or 'missing'!r}: send application/json",
                "unsupported_media_type",
            )
        try:
            document = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise RequestRejected(f"the body is not JSON: {error}", code="invalid_json") from error
        if not isinstance(document, dict):
            raise RequestRejected(
                f"the body is a JSON {type(document).__name__}; send an object", code="invalid_type"
            )
        try:
            body = model.model_validate(document)
        except ValidationError as error:
            raise rejection(error) from error
        self._unknown(body, "")
        return body

    async def _bytes(self, request: Request, *, always: bool) -> bytes:
        too_large = ApiError(
            413, f"the body is larger than {self._max_bytes} bytes", "request_too_large"
        )
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes:
            raise too_large
        chunks: list[bytes] = []
        n_bytes = n_taken = 0
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    n_bytes += len(chunk)
                    if n_bytes > self._max_bytes:
                        raise too_large
                    if not always:
                        self._take(len(chunk))
                        n_taken += len(chunk)
                    chunks.append(chunk)
        except ClientDisconnect as error:
            raise ApiError(400, "the body was cut off", "invalid_json") from error
        except TimeoutError as error:
            raise ApiError(
                408,
                f"{n_bytes} bytes of the body arrived within {BODY_S:g} s, but not its end",
                "request_timeout",
            ) from error
        finally:
            self._room += n_taken
        return b"".join(chunks)

    def _take(self, n_bytes: int) -> None:
        if n_bytes > self._room:
            n_held = ARRIVING * self._max_bytes - self._room
            raise QueueFull(
                f"{n_held} bytes of other bodies are arriving; try again later", retry_after_s=1.0
            )
        self._room -= n_bytes

    def _unknown(self, body: Body, prefix: str) -> None:
        for name in body.model_extra or {}:
            self._on_unknown(name)
            if self._refuse_unknown:
                raise RequestRejected(
                    f"unknown field {prefix + name!r}",
                    code="unknown_parameter",
                    param=prefix + name,
                )


def rejection(error: ValidationError) -> RequestRejected:
    """The most telling complaint: of a union's branches the one whose type fits, else the one that got furthest."""
    first = max(
        error.errors(include_url=False),
        key=lambda e: (not _is_type_error(e["type"]), len(_path(e["loc"]))),
    )
    path = _path(first["loc"])
    param = dotted(path)
    kind = first["type"]
    if kind == "missing":
        return RequestRejected(
            f"{param} is required", code="missing_required_parameter", param=param
        )
    code = "invalid_type" if _is_type_error(kind) else "invalid_value"
    return RequestRejected(f"{param}: {first['msg']}{_got(first)}", code=code, param=param)


def _is_type_error(kind: str) -> bool:
    return any(kind.endswith(suffix) for suffix in TYPE_ERRORS)


def _got(error: Mapping[str, Any]) -> str:
    value = error.get("input")
    if isinstance(value, str | int | float | bool | None):
        return f" (got {str(value)[:80]!r})" if isinstance(value, str) else f" (got {value})"
    return ""


def _path(loc: Sequence[str | int]) -> list[str | int]:
    """Field names and indexes; the names of union branches are pydantic's own and are left out."""
    return [
        part
        for index, part in enumerate(loc)
        if isinstance(part, int) or index == 0 or not _is_branch(part)
    ]


def _is_branch(part: str) -> bool:
    return "[" in part or part in {"str", "int", "float", "bool", "TextPart", "constrained-str"}


def dotted(path: Sequence[str | int]) -> str:
    """`messages[2].content`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
