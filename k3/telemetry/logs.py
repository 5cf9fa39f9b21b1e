"""Log lines on stdout: JSON objects, or text for people. One call of `setup` per process.

A line is a constant message plus fields (`log.info("request finished", extra={"request_id": ..., "ttft_s": ...})`).
Process, instance and rank are added here; request and trace ids come from the running scope (`tracing.py`) unless the
line names them. Repeats of one warning above a rate are counted, not written. No prompt or output text is logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from k3.telemetry import tracing

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
BURST, WINDOW_S = 20, 10.0  # warnings of one message per window
_NOISY = ("uvicorn", "uvicorn.error", "uvicorn.access", "grpc", "asyncio")


@dataclass(slots=True)
class Origin:
    """Who writes: role, instance id (changes when the rank group is rebuilt), rank if any."""

    role: str
    instance: str = ""
    rank: str = ""


def setup(
    format: str,
    level: str,
    role: str,
    instance: str = "",
    *,
    rank: str = "",
    stream: TextIO | None = None,
) -> Origin:
    """Send all logs to `stream` (default stdout). Returns the origin; set its `instance` when it changes.

    format: "json" or "text"; level: "debug", "info", "warning" or "error".
    """
    origin = Origin(role, instance, rank)
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonFormatter(origin) if format == "json" else TextFormatter(origin))
    handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    return origin


def fields_of(record: logging.LogRecord, origin: Origin) -> dict[str, object]:
    """Everything a line says besides time, level, logger and message, in order."""
    fields: dict[str, object] = {"role": origin.role}
    if origin.instance:
        fields["instance"] = origin.instance
    if origin.rank:
        fields["rank"] = origin.rank
    scope = tracing.current()
    if scope is not None:
        fields["request_id"] = scope.request_id
        fields["trace_id"], fields["span_id"] = scope.trace.trace_id, scope.trace.span_id
    fields |= {name: v for name, v in vars(record).items() if name not in _STANDARD}
    return fields


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        time_utc = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "ts": time_utc.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            **fields_of(record, self._origin),
        }
        if record.exc_info:
            line["stack"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: message key=value ...`; the role is left out, a terminal shows one process or prefixes."""

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        fields = fields_of(record, self._origin)
        for name in ("role", "instance", "trace_id", "span_id"):
            fields.pop(name, None)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        tail = "".join(f" {name}={_short(value)}" for name, value in fields.items())
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {record.name}: {record.getMessage()}{tail}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    is_plain = text.isprintable() and " " not in text and text  # a line stays one line
    return text if is_plain else json.dumps(text, ensure_ascii=False)


class RepeatFilter(logging.Filter):
    """Lets `BURST` warnings of one message pass per window; the next one after it says how many were left out.

    Lines below warning always pass: they are one per request or per change of state.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        if record.levelno < logging.WARNING:
            return True
        key = (record.name, str(record.msg))
        start, n = self._seen.get(key, (record.created, 0))
        if record.created - start >= WINDOW_S:
            if n > BURST:
                record.left_out = n - BURST
            start, n = record.created, 0
        if key not in self._seen and len(self._seen) >= 1024:
            self._seen.clear()  # messages are constants; more of them means somebody formats into them
        self._seen[key] = (start, n + 1)
        return n < BURST
