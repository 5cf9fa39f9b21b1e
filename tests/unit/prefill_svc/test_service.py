"""The handler of a `Prefill` call, without a wire: what becomes of its reader."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from k3.v1 import prefill_pb2
from prefill_svc.service import PrefillServicer
from prefill_svc.stream import ResponseStream


class Handoff:
    """Breaks on the first message."""

    def __init__(self) -> None:
        self.stream: ResponseStream | None = None

    def receive(self, export: object, message: prefill_pb2.PrefillRequest) -> None:
        raise AssertionError("a bug")

    def lost(self, export: object) -> None:
        assert self.stream is not None
        self.stream.finish(None)


async def test_a_bug_while_reading_a_call_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    handoff = Handoff()

    def open_(start: prefill_pb2.Start, stream: ResponseStream) -> tuple[object, object]:
        handoff.stream = stream
        return SimpleNamespace(handoff=handoff), object()

    async def messages() -> AsyncIterator[prefill_pb2.PrefillRequest]:
        yield prefill_pb2.PrefillRequest(start=prefill_pb2.Start(request_id="r"))
        yield prefill_pb2.PrefillRequest(abort=prefill_pb2.Abort())

    said: list[prefill_pb2.PrefillResponse] = []

    async def write(response: prefill_pb2.PrefillResponse) -> None:
        said.append(response)

    servicer = PrefillServicer(SimpleNamespace(open=open_))  # type: ignore[arg-type]
    await servicer.Prefill(messages(), SimpleNamespace(write=write))  # type: ignore[arg-type]
    assert "a bug" in caplog.text
    assert [response.WhichOneof("message") for response in said] == ["ending"]
