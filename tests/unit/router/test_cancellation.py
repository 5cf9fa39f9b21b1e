"""A client that goes away cancels its call to decode, in every state; nothing is left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.unit.router.conftest import RunningRouter, until
from tests.unit.router.fake_engine import HOLD

BODY: dict[str, Any] = {"prompt": "x"}


def counters(router: RunningRouter) -> tuple[int, int, int, int]:
    serving = router.router.serving
    in_flight = sum(instance.in_flight for instance in serving.registry.instances)
    return (
        len(serving.requests),
        serving.admission.n_in_flight,
        serving.admission.queue_depth,
        in_flight,
    )


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [[HOLD], [[97], HOLD]], ids=["prefilling", "decoding"])
async def test_disconnecting_cancels_the_call(
    router: RunningRouter, stream: bool, script: list[Any]
) -> None:
    router.decode.script = script
    async with httpx.AsyncClient(base_url=router.url) as client:
        body = {**BODY, "stream": stream, "n": 2}
        task = asyncio.create_task(client.post("/v1/completions", json=body))
        n_calls = (
            2 if len(script) > 1 else 1
        )  # the second sample waits for the first token of the first
        await until(lambda: router.decode.n_running == n_calls)
        await cancel(task)
    await until(lambda: router.decode.n_cancelled == n_calls)
    await until(lambda: counters(router) == (0, 0, 0, 0))
    stage = "decode" if len(script) > 1 else "prefill"
    metrics = (await router.client.get("/metrics")).text
    assert f'k3_router_requests_cancelled_total{{stage="{stage}"}} 1.0' in metrics


async def test_disconnecting_while_queued_leaves_the_queue(router: RunningRouter) -> None:
    router.decode.change(pages_free=0)
    serving = router.router.serving
    await until(lambda: serving.registry.decode_views()[0].pages_free == 0)
    async with httpx.AsyncClient(base_url=router.url) as client:
        task = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: serving.admission.queue_depth == 1)
        await cancel(task)
    await until(lambda: counters(router) == (0, 0, 0, 0))
    assert not router.decode.requests


async def test_counters_return_to_zero_after_answers_of_every_kind(router: RunningRouter) -> None:
    router.decode.script = lambda request: [[97]] * (1 + request.sampling.seed % 3)
    bodies = [
        {**BODY, "seed": seed, "n": 1 + seed % 2, "stream": bool(seed % 3), "stop": ["aa"] if seed % 5 else None}
        for seed in range(12)
    ]  # fmt: skip
    answers = await asyncio.gather(
        *(router.client.post("/v1/completions", json=body) for body in bodies)
    )
    assert {answer.status_code for answer in answers} == {200}
    await until(lambda: counters(router) == (0, 0, 0, 0))


async def test_an_operator_aborts_a_request(router: RunningRouter) -> None:
    router.decode.script = [[97], HOLD]
    body = {**BODY, "stream": True}
    headers = {"X-Request-Id": "victim"}
    task = asyncio.create_task(router.client.post("/v1/completions", json=body, headers=headers))
    async with httpx.AsyncClient(base_url=router.admin_url) as admin:
        await until(lambda: router.decode.n_running == 1)
        listed = (await admin.get("/admin/requests")).json()
        assert [entry["id"] for entry in listed] == ["victim"]
        aborted = await admin.delete("/admin/requests/victim")
        assert aborted.status_code == 202
        answer = await task
        assert '"code":"aborted"' in answer.text
        assert "[DONE]" not in answer.text
        assert (await admin.delete("/admin/requests/victim")).status_code == 404
    await until(lambda: counters(router) == (0, 0, 0, 0))
