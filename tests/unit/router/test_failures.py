"""What a client sees when instances refuse, fail, die, hang or are not there: before the first token and after it."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from k3.config.router_sections import AdmissionConfig, HttpConfig
from k3.errors import GroupFailed, QueueFull, RequestRejected, Unavailable
from k3.v1 import decode_pb2
from router.fleet.circuit import FAILURES_TO_OPEN
from router.lifecycle import Phase
from router.text.folder import ModelFolder
from router.text.threads import N_THREADS
from tests.unit.router.conftest import DEADLINE_S, RunningRouter, running_router, until
from tests.unit.router.fake_engine import CUT, HOLD, FakeEngine

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, Any] = {"prompt": "x"}


def pair_of_decodes(first: Any, second: Any) -> list[FakeEngine]:
    return [
        FakeEngine(instance_id="decode-a", script=first),
        FakeEngine(instance_id="decode-b", script=second),
    ]


def failed(reason: str, instance: str = "prefill-a") -> decode_pb2.CandidateFailed:
    return decode_pb2.CandidateFailed(instance_id=instance, reason=reason, message="why")


async def test_a_rejection_by_decode_is_passed_on_and_not_retried(folder: ModelFolder) -> None:
    error = RequestRejected("too long", code="context_length_exceeded", param="prompt")
    decodes = pair_of_decodes([error], [[97]])
    async with running_router(folder, decodes=decodes) as router:
        answer = await router.client.post(TEXT, json=BODY)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert not decodes[1].requests


@pytest.mark.parametrize(
    "first",
    [
        [CUT],
        [QueueFull("full")],
        [Unavailable("leaving", code="draining")],
        [GroupFailed("a rank died")],
    ],
)
async def test_another_decode_is_tried_before_the_first_token(
    folder: ModelFolder, first: list[Any]
) -> None:
    decodes = pair_of_decodes(first, [[97]])
    async with running_router(folder, decodes=decodes) as router:
        await until(lambda: len(router.router.serving.registry.decode_views()) == 2)
        answer = await router.client.post(TEXT, json=BODY)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "a"
        assert [request.attempt for request in decodes[0].requests] == [1]
        assert [request.attempt for request in decodes[1].requests] == [2]
        metrics = (await router.client.get("/metrics")).text
        assert 'k3_router_retries_total{reason="' in metrics


async def test_another_decode_is_tried_when_one_goes_down_and_cancels_its_calls(
    folder: ModelFolder,
) -> None:
    decodes = pair_of_decodes([HOLD], [[97]])
    async with running_router(folder, decodes=decodes) as router:
        await until(lambda: len(router.router.serving.registry.decode_views()) == 2)
        asked = asyncio.create_task(router.client.post(TEXT, json=BODY))
        await until(lambda: bool(decodes[0].requests))
        await decodes[0].stop()
        answer = await asked
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "a"


@pytest.mark.parametrize(
    ("first", "second"),
    [(CUT, CUT), (GroupFailed("a rank died"), CUT), (GroupFailed("a rank died"),) * 2],
    ids=["processes", "ranks, then a process", "ranks"],
)
async def test_a_request_that_saw_two_instances_die_is_poison(
    folder: ModelFolder, first: Any, second: Any
) -> None:
    decodes = pair_of_decodes([0.0, first], [0.0, second])
    async with running_router(folder, decodes=decodes) as router:
        await until(lambda: len(router.router.serving.registry.decode_views()) == 2)
        answer = await router.client.post(TEXT, json=BODY)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "poison_request"
        assert answer.headers["x-should-retry"] == "false"
        assert [len(decode.requests) for decode in decodes] == [1, 1]


async def test_a_lost_decode_without_another_is_a_bad_gateway(router: RunningRouter) -> None:
    router.decode.script = [0.0, CUT]
    answer = await router.client.post(TEXT, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "instance_failed")
    assert "127.0.0.1" not in answer.text
    await router.ready()  # it answers its probe, so it is taken back
    router.decode.script = [[97]]
    assert (await router.client.post(TEXT, json=BODY)).status_code == 200


async def test_a_full_decode_gets_a_second_chance_and_then_the_client_is_told_to_wait(
    router: RunningRouter,
) -> None:
    router.decode.script = [QueueFull("full", retry_after_s=7)]
    answer = await router.client.post(TEXT, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "capacity_exceeded")
    assert answer.headers["retry-after"] == "7"
    assert len(router.decode.requests) == 2


@pytest.mark.parametrize(
    ("reason", "code"),
    [("unavailable", "instance_failed"), ("transfer_stalled", "transfer_failed")],
)
async def test_used_up_candidates_are_a_bad_gateway(
    router: RunningRouter, reason: str, code: str
) -> None:
    router.decode.script = [
        failed(reason),
        Unavailable("all candidates failed", code="unavailable"),
    ]
    answer = await router.client.post(TEXT, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, code)
    assert len(router.decode.requests) == 1


async def test_a_candidate_that_keeps_failing_is_left_out(folder: ModelFolder) -> None:
    prefills = [FakeEngine(role="prefill", instance_id=f"prefill-{n}") for n in "ab"]
    decodes = [FakeEngine(script=[failed("unavailable"), [97]])]
    async with running_router(folder, decodes=decodes, prefills=prefills) as router:
        registry = router.router.serving.registry
        await until(lambda: len([i for i in registry.instances if i.is_usable]) == 3)
        for _ in range(FAILURES_TO_OPEN + 1):
            assert (await router.client.post(TEXT, json=BODY)).status_code == 200
        names = [{c.instance_id for c in request.candidates} for request in decodes[0].requests]
        assert names == [{"prefill-a", "prefill-b"}] * FAILURES_TO_OPEN + [{"prefill-b"}]


async def test_a_pair_that_cannot_transfer_is_not_chosen_again(folder: ModelFolder) -> None:
    prefills = [FakeEngine(role="prefill", instance_id=f"prefill-{n}") for n in "ab"]
    decodes = [FakeEngine(script=[failed("layout_mismatch"), [97]])]
    async with running_router(folder, decodes=decodes, prefills=prefills) as router:
        registry = router.router.serving.registry
        await until(lambda: len([i for i in registry.instances if i.is_usable]) == 3)
        for _ in range(2):
            assert (await router.client.post(TEXT, json=BODY)).status_code == 200
        names = [[c.instance_id for c in request.candidates] for request in decodes[0].requests]
        assert names == [["prefill-a", "prefill-b"], ["prefill-b"]]


@pytest.mark.parametrize(
    "fail", [CUT, GroupFailed("a rank died"), Unavailable("x", code="draining")]
)
async def test_after_the_first_token_a_stream_ends_with_an_error_event(
    router: RunningRouter, fail: Any
) -> None:
    router.decode.script = [[97], fail]
    answer = await router.client.post(TEXT, json={**BODY, "stream": True})
    assert answer.status_code == 200
    blocks = answer.text.strip().split("\n\n")
    assert json.loads(blocks[0][6:])["choices"][0]["text"] == "a"
    assert json.loads(blocks[-1][6:])["error"]["message"]
    assert "[DONE]" not in answer.text
    assert len(router.decode.requests) == 1


async def test_after_the_first_token_a_whole_answer_is_an_error(router: RunningRouter) -> None:
    router.decode.script = [[97], CUT]
    answer = await router.client.post(TEXT, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "instance_failed")


async def test_a_finish_that_nobody_knows_is_a_failure_of_the_instance(
    router: RunningRouter,
) -> None:
    router.decode.finish = 0
    router.decode.script = [[97]]
    answer = await router.client.post(TEXT, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "instance_failed")


async def test_a_failure_before_the_first_token_of_a_stream_is_an_http_error(
    router: RunningRouter,
) -> None:
    router.decode.script = [GroupFailed("a rank died")]
    answer = await router.client.post(
        CHAT, json={"messages": [{"role": "user", "content": "x"}], "stream": True}
    )
    assert answer.status_code == 502
    assert answer.headers["content-type"] == "application/json"


async def test_slow_first_tokens_get_headers_and_comments(folder: ModelFolder) -> None:
    async with running_router(folder, http=HttpConfig(sse_heartbeat_s=0.02)) as router:
        router.decode.script = [0.2, GroupFailed("a rank died")]
        answer = await router.client.post(TEXT, json={**BODY, "stream": True})
        assert answer.status_code == 200  # too late for an HTTP error
        assert answer.text.startswith(": ping\n\n")
        assert '"code":"instance_failed"' in answer.text
        assert "[DONE]" not in answer.text


@pytest.mark.parametrize("where", ["body", "header"])
async def test_a_deadline_is_a_gateway_timeout(router: RunningRouter, where: str) -> None:
    router.decode.script = [HOLD]
    headers = {"X-Request-Timeout-Ms": "50"} if where == "header" else {}
    body = BODY if where == "header" else {**BODY, "timeout_ms": 50}
    answer = await router.client.post(TEXT, json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    await router.decode.cancelled.wait()


async def test_waiting_to_be_tokenized_counts_for_the_deadline(router: RunningRouter) -> None:
    texts, free = router.router.serving.texts, threading.Event()
    busy = [asyncio.create_task(texts.run(lambda: free.wait(DEADLINE_S))) for _ in range(N_THREADS)]
    waiting = asyncio.create_task(router.client.post(TEXT, json={**BODY, "timeout_ms": 50}))
    await until(lambda: texts.n_open > N_THREADS)
    late = asyncio.get_running_loop().time() + 0.1
    await until(lambda: asyncio.get_running_loop().time() > late)
    free.set()
    answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert await asyncio.gather(*busy) == [True] * N_THREADS


async def test_no_more_prompts_wait_to_be_tokenized_than_may_be_served_and_wait(
    folder: ModelFolder,
) -> None:
    admission = AdmissionConfig(max_in_flight=N_THREADS, max_queue=0)
    async with running_router(folder, admission=admission) as router:
        texts, free = router.router.serving.texts, threading.Event()
        busy = [
            asyncio.create_task(texts.run(lambda: free.wait(DEADLINE_S))) for _ in range(N_THREADS)
        ]
        await until(lambda: texts.n_open == N_THREADS)
        answer = await router.client.post(TEXT, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"] == "1"
        metrics = (await router.client.get("/metrics")).text
        assert 'k3_router_rejected_total{reason="queue_full"} 1.0' in metrics
        free.set()
        await asyncio.gather(*busy)
        assert (await router.client.post(TEXT, json=BODY)).status_code == 200


async def test_every_error_answer_is_counted_by_its_code_and_once(router: RunningRouter) -> None:
    router.decode.script = [GroupFailed("a rank died", code="poison_request")]
    for path, body in (
        (TEXT, {}),
        (TEXT, {**BODY, "model": "another"}),
        (TEXT, BODY),
        ("/nowhere", {}),
    ):
        await router.client.post(path, json=body)
    router.router.serving.lifecycle.phase = Phase.REFUSING
    assert (await router.client.post(TEXT, json=BODY)).status_code == 503
    metrics = (await router.client.get("/metrics")).text
    for code in (
        *("missing_required_parameter", "model_not_found", "poison_request", "not_found"),
        "draining",
    ):
        assert f'k3_router_errors_total{{code="{code}"}} 1.0' in metrics, code
    assert 'k3_router_rejected_total{reason="draining"} 1.0' in metrics


async def test_a_deadline_in_mid_stream_is_an_error_event(router: RunningRouter) -> None:
    router.decode.script = [[97], HOLD]
    answer = await router.client.post(TEXT, json={**BODY, "stream": True, "timeout_ms": 300})
    assert '"code":"deadline_exceeded"' in answer.text
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize(
    ("decodes", "prefills", "code"),
    [
        ([], None, "no_decode_available"),
        (None, [], "no_prefill_available"),
    ],
)
async def test_missing_instances_are_unavailable(
    folder: ModelFolder, decodes: Any, prefills: Any, code: str
) -> None:
    async with running_router(
        folder, decodes=decodes, prefills=prefills, wait_ready=False
    ) as router:
        registry = router.router.serving.registry
        n_engines = 1 if router.decode.address == "" or router.prefill.address == "" else 2
        await until(lambda: [i.is_usable for i in registry.instances] == [True] * n_engines)
        answer = await router.client.post(TEXT, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
        assert answer.headers["retry-after"] == "1"
        ready = await router.client.get("/ready")
        assert ready.status_code == 503
        assert code in [reason["code"] for reason in ready.json()["reasons"]]
        assert (await router.client.get("/v1/models")).json()["data"] == []


async def test_different_layouts_are_never_paired(folder: ModelFolder) -> None:
    prefills = [FakeEngine(role="prefill", instance_id="prefill-a", layout_fingerprint="other")]
    async with running_router(folder, prefills=prefills, wait_ready=False) as router:
        registry = router.router.serving.registry
        await until(lambda: [i.is_usable for i in registry.instances] == [True, True])
        ready = await router.client.get("/ready")
        assert [reason["code"] for reason in ready.json()["reasons"]] == ["incompatible"]
        async with httpx.AsyncClient(base_url=router.admin_url) as admin:
            entries = (await admin.get("/admin/instances")).json()
        unfit = {entry["id"]: entry["incompatible_with"] for entry in entries}
        assert unfit == {"decode-a": ["prefill-a"], "prefill-a": ["decode-a"]}
        assert (await router.client.post(TEXT, json=BODY)).status_code == 503


async def test_requests_wait_in_the_router_until_decode_has_room(folder: ModelFolder) -> None:
    admission = AdmissionConfig(max_queue=2)
    async with running_router(folder, admission=admission) as router:
        router.decode.script = [[97]]
        router.decode.change(pages_free=0)
        registry = router.router.serving.registry
        await until(lambda: registry.decode_views()[0].pages_free == 0)
        waiting = [asyncio.create_task(router.client.post(TEXT, json=BODY)) for _ in range(2)]
        await until(lambda: router.router.serving.admission.queue_depth == 2)
        refused = await router.client.post(TEXT, json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert "k3_router_queue_depth 2.0" in (await router.client.get("/metrics")).text
        router.decode.change(pages_free=64)
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]


async def test_waiting_too_long_in_the_queue_is_a_timeout(folder: ModelFolder) -> None:
    admission = AdmissionConfig(queue_timeout_s=0.05)
    async with running_router(folder, admission=admission) as router:
        router.decode.change(pages_free=0)
        registry = router.router.serving.registry
        await until(lambda: registry.decode_views()[0].pages_free == 0)
        answer = await router.client.post(TEXT, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "queue_timeout")
        assert "x-should-retry" not in answer.headers
