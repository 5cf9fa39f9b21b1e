"""W3C trace context and request ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.telemetry import tracing

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_traceparent_is_read_and_written_unchanged():
    trace = tracing.parse_trace(f"00-{TRACE}-{SPAN}-01", "a=1,b=2")
    assert trace == tracing.Trace(TRACE, SPAN, 1, "a=1,b=2")
    assert trace.traceparent == f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-extra",
    ],
)
def test_a_malformed_traceparent_is_ignored(header):
    assert tracing.parse_trace(header) is None


def test_a_future_version_with_more_parts_is_accepted():
    trace = tracing.parse_trace(f"01-{TRACE}-{SPAN}-01-more")
    assert trace is not None
    assert trace.trace_id == TRACE


@given(st.dictionaries(st.sampled_from(["x-request-id", "traceparent", "tracestate"]), st.text()))
def test_whatever_comes_in_a_sound_scope_goes_out(headers):
    scope = tracing.incoming(headers)
    sent = dict(tracing.outgoing(scope))
    assert tracing.REQUEST_ID.fullmatch(sent["x-request-id"])
    trace = tracing.parse_trace(sent["traceparent"])
    assert trace is not None
    assert trace.trace_id == scope.trace.trace_id


def test_a_good_request_id_is_kept_and_a_bad_one_replaced():
    assert tracing.incoming({"x-request-id": "a.b:c-1"}).request_id == "a.b:c-1"
    for bad in ("", "a b", "x" * 129, "é"):
        assert tracing.incoming({"x-request-id": bad}).request_id.startswith("req-")


def test_outside_a_request_nothing_is_passed_on():
    assert tracing.outgoing() == ()
    with tracing.scope(tracing.Scope("r", tracing.new_trace())):
        assert dict(tracing.outgoing())["x-request-id"] == "r"
    assert tracing.current() is None
