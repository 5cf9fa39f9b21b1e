"""Exceptions to OpenAI error objects: `{"error": {"message", "type", "param", "code"}}` with status and headers.

The status comes from `k3/rpc/status.py`; the few codes that need another one, the type names and the retry headers are
here. Nothing else leaves the router as an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3.errors import K3Error, QueueFull, RequestRejected, Unavailable
from k3.rpc.status import CLIENT_CLOSED, http_status

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    502: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# Codes that mean a failed pair (502), whatever class carries them.
BAD_GATEWAY = frozenset({"instance_failed", "transfer_failed", "poison_request"})
# Trying again would bill tokens twice or meet the same bug; a wait in the queue has billed nothing.
NO_RETRY = frozenset({500, 502, 504})
NOTHING_BILLED = frozenset({"queue_timeout"})
MAX_RETRY_AFTER_S = 60


class ApiError(Exception):
    """An error as a client sees it."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers: Mapping[str, str] = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        return {
            "error": {
                "message": self.message,
                "type": TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def api_error(error: BaseException) -> ApiError:
    """The client's view of an exception. Foreign exceptions tell nothing of themselves."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, K3Error):
        return _with_headers(
            500, "internal error; the server's log has the request id", "internal_error"
        )
    status = 502 if error.code in BAD_GATEWAY else http_status(error)
    status = 502 if status == CLIENT_CLOSED else status
    param = error.param if isinstance(error, RequestRejected) else None
    if status == 500:
        return _with_headers(
            500, "internal error; the server's log has the request id", "internal_error"
        )
    retry_after_s = error.retry_after_s if isinstance(error, QueueFull) else 1.0
    wait = status == 429 or (status == 503 and isinstance(error, Unavailable))
    return _with_headers(status, str(error), error.code, param, retry_after_s if wait else None)


def _with_headers(
    status: int,
    message: str,
    code: str,
    param: str | None = None,
    retry_after_s: float | None = None,
) -> ApiError:
    headers: dict[str, str] = {}
    if retry_after_s is not None:
        headers["Retry-After"] = str(min(max(round(retry_after_s), 1), MAX_RETRY_AFTER_S))
    if status in NO_RETRY and code not in NOTHING_BILLED:
        headers["x-should-retry"] = "false"
    return ApiError(status, message, code, param, headers)


def model_not_found(name: str) -> ApiError:
    """The model is not served here."""
    return ApiError(
        404,
        f"the model {name!r} does not exist; GET /v1/models lists the served ones",
        "model_not_found",
        "model",
    )
