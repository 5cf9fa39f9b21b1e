"""Exception <-> gRPC status <-> HTTP status: one table.

Across gRPC an error travels as status code, message and trailing metadata: `k3-error-kind` and `k3-error-code`
(always), `k3-error-param` (rejections) and `k3-retry-after-s` (full queues), so that the exception raised at the
caller equals the one raised at the callee. A status without our metadata comes from the transport (connection lost,
deadline, cancelled call) and is mapped by its code alone.
"""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

import grpc
import grpc.aio

from k3.errors import (
    ConfigError,
    DeadlineExceeded,
    GroupFailed,
    K3Error,
    LayoutMismatch,
    ModelError,
    NotFound,
    QueueFull,
    ReconnectRequired,
    RequestAborted,
    RequestRejected,
    TransferError,
    Unavailable,
)

ERROR_KIND, ERROR_CODE = "k3-error-kind", "k3-error-code"
ERROR_PARAM, RETRY_AFTER = "k3-error-param", "k3-retry-after-s"
_SECONDS = re.compile(r"\d{1,6}(\.\d{1,3})?")
MAX_DETAILS = 2000  # characters; gRPC drops a whole status whose metadata passes 8 KiB


class Status(NamedTuple):
    """How one class is told to callers."""

    grpc: grpc.StatusCode
    http: int


CLIENT_CLOSED = 499
INTERNAL = Status(grpc.StatusCode.INTERNAL, 500)
# First match wins: subclasses before their parents.
TABLE: tuple[tuple[type[K3Error], Status], ...] = (
    (RequestRejected, Status(grpc.StatusCode.INVALID_ARGUMENT, 400)),
    (NotFound, Status(grpc.StatusCode.NOT_FOUND, 404)),
    (QueueFull, Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 429)),
    (GroupFailed, Status(grpc.StatusCode.UNAVAILABLE, 502)),
    (Unavailable, Status(grpc.StatusCode.UNAVAILABLE, 503)),
    (LayoutMismatch, Status(grpc.StatusCode.FAILED_PRECONDITION, 503)),
    (ReconnectRequired, Status(grpc.StatusCode.FAILED_PRECONDITION, 503)),
    (DeadlineExceeded, Status(grpc.StatusCode.DEADLINE_EXCEEDED, 504)),
    (RequestAborted, Status(grpc.StatusCode.ABORTED, CLIENT_CLOSED)),
    (TransferError, Status(grpc.StatusCode.DATA_LOSS, 502)),
    (ConfigError, INTERNAL),
    (ModelError, INTERNAL),
    (K3Error, INTERNAL),
)
# What a status of the transport means, without a word from the other side's code.
TRANSPORT: dict[grpc.StatusCode, type[K3Error]] = {
    grpc.StatusCode.INVALID_ARGUMENT: RequestRejected,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: RequestAborted,
    grpc.StatusCode.ABORTED: RequestAborted,
    grpc.StatusCode.DATA_LOSS: TransferError,
    grpc.StatusCode.FAILED_PRECONDITION: LayoutMismatch,
    # The peer does not serve this method: not the service we expect at this address.
    grpc.StatusCode.UNIMPLEMENTED: Unavailable,
}


def status_of(error: BaseException) -> Status:
    """The row of an exception; anything foreign is internal."""
    if isinstance(error, TimeoutError):
        return status_of(DeadlineExceeded(""))
    if isinstance(error, asyncio.CancelledError):
        return Status(grpc.StatusCode.CANCELLED, CLIENT_CLOSED)
    return next((status for kind, status in TABLE if isinstance(error, kind)), INTERNAL)


def to_grpc(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Status code and details. The text of a foreign exception stays in the log."""
    if isinstance(error, K3Error):
        return status_of(error).grpc, str(error)[:MAX_DETAILS]
    if isinstance(error, TimeoutError):
        return status_of(error).grpc, "a deadline of the server passed"
    return status_of(error).grpc, f"internal error ({type(error).__name__}); see the server's log"


def trailing_metadata(error: BaseException) -> tuple[tuple[str, str], ...]:
    """What travels beside status and details."""
    if isinstance(error, TimeoutError):
        error = DeadlineExceeded("")
    if not isinstance(error, K3Error):
        error = K3Error("")
    metadata = [(ERROR_KIND, type(error).__name__), (ERROR_CODE, error.code)]
    if isinstance(error, RequestRejected) and error.param is not None:
        param = error.param[:MAX_DETAILS].encode("ascii", "backslashreplace").decode("ascii")
        metadata.append((ERROR_PARAM, param))
    if isinstance(error, QueueFull):
        metadata.append((RETRY_AFTER, f"{error.retry_after_s:.3f}"))
    return tuple(metadata)


def from_rpc_error(error: grpc.aio.AioRpcError) -> K3Error:
    """The exception a failed call stands for; chain it with `from error`."""
    status = error.code()
    details = error.details() or f"the call failed with {status.name}"
    metadata = {
        str(name): value if isinstance(value, str) else value.decode("utf-8", "replace")
        for name, value in error.trailing_metadata() or ()
    }
    named = (kind for kind, _ in TABLE if kind.__name__ == metadata.get(ERROR_KIND))
    kind = next(named, TRANSPORT.get(status, K3Error))
    code = metadata.get(ERROR_CODE)
    if issubclass(kind, RequestRejected):
        return RequestRejected(details, code=code, param=metadata.get(ERROR_PARAM))
    if issubclass(kind, QueueFull):
        seconds = metadata.get(RETRY_AFTER, "")
        hint = float(seconds) if _SECONDS.fullmatch(seconds) else 1.0
        return QueueFull(details, code=code, retry_after_s=hint)
    return kind(details, code=code)


def http_status(error: BaseException) -> int:
    """HTTP status of an exception."""
    return status_of(error).http
