"""The whole exception family.

    K3Error
    ├── ConfigError            start-up: the configuration cannot be read             exit 2
    │   └── RefusedError       start-up: the combination is refused, all rules at once exit 2
    ├── PortInUse              start-up: a port of ours is taken                      exit 4
    ├── ModelError             start-up: checkpoint and code do not fit               exit 3
    ├── RequestRejected        the request is wrong; never retried                    INVALID_ARGUMENT
    ├── NotFound               unknown model, instance or id                          NOT_FOUND
    ├── QueueFull              no room now; try later or elsewhere                    RESOURCE_EXHAUSTED
    ├── Unavailable            starting, draining or lost; try elsewhere              UNAVAILABLE
    │   └── GroupFailed        a rank died or hangs; the whole group is lost          UNAVAILABLE
    ├── LayoutMismatch         the two sides of a pair do not fit                     FAILED_PRECONDITION
    ├── ReconnectRequired      the peer is unknown here; call Connect and try again   FAILED_PRECONDITION
    ├── DeadlineExceeded       a deadline of ours passed                              DEADLINE_EXCEEDED
    ├── RequestAborted         the caller, or a newer generation, ended it            ABORTED
    └── TransferError          bytes did not arrive                                   DATA_LOSS

Types are for programs, messages for people: what was wrong, the values, what was expected, what to do.
`k3/rpc/status.py` maps each class to its gRPC and HTTP status.
"""

from __future__ import annotations


class K3Error(Exception):
    """Root of the family. `retryable` says whether another instance may succeed."""

    retryable: bool = False
    code: str = "internal_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class ConfigError(K3Error):
    """The configuration cannot be read; exit code 2."""

    code = "invalid_config"


class RefusedError(ConfigError):
    """The combination is refused. `reasons` holds every refusal as text, with its remedy."""

    code = "refused"

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = reasons


class PortInUse(K3Error):
    """A port of ours is taken; exit code 4. The message names a free one."""

    code = "port_in_use"


class ModelError(K3Error):
    """Checkpoint and code do not fit; exit code 3. Names the tensor or the field."""

    code = "model_error"


class RequestRejected(K3Error):
    """The request is wrong. `param` is the dotted path of the offending field."""

    code = "invalid_value"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param


class NotFound(K3Error):
    """Unknown model, instance or id."""

    code = "not_found"


class QueueFull(K3Error):
    """No room now. `retry_after_s` is a hint."""

    retryable = True
    code = "queue_full"

    def __init__(
        self, message: str, *, code: str | None = None, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class Unavailable(K3Error):
    """Starting, draining or lost."""

    retryable = True
    code = "unavailable"


class GroupFailed(Unavailable):
    """A rank died, failed a step or hangs; the whole group is lost."""

    code = "instance_failed"


class LayoutMismatch(K3Error):
    """The two sides of a pair do not fit; names the first differing field."""

    retryable = True
    code = "layout_mismatch"


class ReconnectRequired(K3Error):
    """The peer is unknown or outdated here."""

    retryable = True
    code = "reconnect_required"


class DeadlineExceeded(K3Error):
    """A deadline of ours passed."""

    code = "deadline_exceeded"


class RequestAborted(K3Error):
    """The caller, or a newer generation, ended it."""

    code = "aborted"


class TransferError(K3Error):
    """Bytes did not arrive, or not all of them."""

    retryable = True
    code = "transfer_failed"
