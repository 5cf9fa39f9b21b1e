"""schemathesis on /openapi.json: whatever is sent, no 5xx, and every error in the one shape."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from router.openai.schemas import ErrorBody
from tests.unit.router.conftest import running_router
from tests.unit.router.fake_engine import FakeEngine


class BackgroundRouter:
    """A router on an event loop of its own, because schemathesis is synchronous."""

    def __init__(self, folder: Any) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self.url = ""

    def __enter__(self) -> BackgroundRouter:
        self._thread.start()
        decodes = [FakeEngine(script=[[97], [98]])]
        self._context = running_router(self._folder, decodes=decodes)
        self.url = self._wait(self._context.__aenter__()).url
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)


@pytest.fixture(scope="module")
def api(folder: Any) -> Iterator[Any]:
    with BackgroundRouter(folder) as router:
        yield schemathesis.openapi.from_url(f"{router.url}/openapi.json")


def operations(api: Any) -> Iterator[Any]:
    for result in api.get_all_operations():
        yield result.ok()


def test_no_input_gets_a_5xx_or_a_body_outside_the_error_shape(api: Any) -> None:
    seen: set[str] = set()
    for operation in operations(api):
        seen.add(operation.path)
        for mode in schemathesis.GenerationMode:
            attack(operation.as_strategy(generation_mode=mode))
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"} <= seen


def attack(cases: Any) -> None:
    """Send generated requests of one operation and judge every answer."""

    @given(cases)
    @settings(
        max_examples=8,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def judge(case: Any) -> None:
        response = case.call(timeout=20)
        assert response.status_code < 500, (case.body, response.text)
        assert response.headers["x-request-id"]
        if response.status_code >= 400:
            ErrorBody.model_validate_json(response.content)

    with suppress(Unsatisfiable):  # an operation without parameters has no negative cases
        judge()
