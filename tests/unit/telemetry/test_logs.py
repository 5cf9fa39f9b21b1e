"""Log lines: shape, origin, scope, repeats."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from k3.telemetry import logs, tracing

log = logging.getLogger("k3.test")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_holds_origin_and_fields(stream):
    origin = logs.setup("json", "info", "decode", rank="pp0", stream=stream)
    log.info("row opened", extra={"row": 3, "ttft_s": 0.25})
    origin.instance = "decode-a-1"
    log.debug("not shown")
    log.warning("row closed")
    first, second = lines(stream)
    assert first["msg"] == "row opened"
    assert (first["level"], first["logger"], first["role"]) == ("info", "k3.test", "decode")
    assert (first["rank"], first["row"], first["ttft_s"]) == ("pp0", 3, 0.25)
    assert "instance" not in first
    assert second["instance"] == "decode-a-1"
    assert str(first["ts"]).endswith("Z")


def test_lines_inside_a_request_carry_its_ids(stream):
    logs.setup("json", "info", "router", stream=stream)
    scope = tracing.Scope("req-1", tracing.new_trace())
    with tracing.scope(scope):
        log.info("inside")
        log.info("another request", extra={"request_id": "req-2"})
    log.info("outside")
    inside, other, outside = lines(stream)
    assert (inside["request_id"], inside["trace_id"]) == ("req-1", scope.trace.trace_id)
    assert other["request_id"] == "req-2"
    assert "request_id" not in outside


def test_an_exception_is_one_json_line_with_its_stack(stream):
    logs.setup("json", "info", "router", stream=stream)
    try:
        raise ValueError("boom\nagain")
    except ValueError:
        log.exception("call failed")
    (line,) = lines(stream)
    assert "ValueError: boom" in str(line["stack"])


def test_text_lines_are_for_people(stream):
    logs.setup("text", "info", "router", stream=stream)
    log.info("request finished", extra={"ttft_s": 0.123456, "finish": "stop", "why": "a b"})
    line = stream.getvalue()
    assert "INFO    k3.test: request finished ttft_s=0.1235 finish=stop" in line
    assert 'why="a b"' in line


def test_a_field_cannot_begin_a_line_of_its_own(stream):
    logs.setup("text", "info", "router", stream=stream)
    log.info("said", extra={"detail": "a\nERROR:forged", "name_": "\x1b[2J", "empty": ""})
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert line.endswith('said detail="a\\nERROR:forged" name_="\\u001b[2J" empty=""\n')


def test_one_line_per_request_is_never_left_out(stream):
    logs.setup("json", "info", "router", stream=stream)
    for i in range(3 * logs.BURST):
        log.info("request finished", extra={"request_id": f"req-{i}"})
    assert len(lines(stream)) == 3 * logs.BURST


def test_repeated_warnings_are_counted_instead_of_written(stream):
    logs.setup("json", "info", "router", stream=stream)
    start = 1_000.0
    for i in range(logs.BURST + 7):
        record = log.makeRecord("k3.test", logging.WARNING, "f", 1, "peer lost", (), None)
        record.created = start + i * 0.001
        log.handle(record)
    log.warning("something else")
    record = log.makeRecord("k3.test", logging.WARNING, "f", 1, "peer lost", (), None)
    record.created = start + logs.WINDOW_S
    log.handle(record)
    written = lines(stream)
    assert [line["msg"] for line in written] == ["peer lost"] * logs.BURST + [
        "something else",
        "peer lost",
    ]
    assert written[-1]["left_out"] == 7
