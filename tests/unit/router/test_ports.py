"""Everything that is not a generation: operations, admin port, tokenizer endpoints, drain, HTTP rules."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from k3.config.router_sections import HttpConfig
from k3.errors import ConfigError, PortInUse
from k3.types import Speculation
from k3.v1 import common_pb2, decode_pb2
from router.__main__ import bind
from router.text.folder import ModelFolder
from router.text.threads import N_THREADS
from tests.unit.router.conftest import DEADLINE_S, RunningRouter, running_router, until
from tests.unit.router.fake_engine import HOLD, FakeEngine

TEXT, JSON = "/v1/completions", {"Content-Type": "application/json"}


async def test_operations_answer(router: RunningRouter) -> None:
    get = router.client.get
    for path in ("/health", "/healthz", "/livez", "/ping"):
        assert (await get(path)).json() == {"status": "ok"}
    assert (await get("/ready")).json() == {"ready": True, "reasons": []}
    assert (await get("/startup")).status_code == 200
    version = (await get("/version")).json()
    assert [entry["id"] for entry in version["instances"]] == ["prefill-a", "decode-a"]
    models = (await get("/v1/models")).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("tiny", 512)]
    assert (await get("/v1/models/tiny")).json()["owned_by"] == "k3-serving"
    missing = await get("/v1/models/gpt")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_metrics_are_there_before_traffic_and_by_accept(router: RunningRouter) -> None:
    answer = await router.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    for series in (
        'k3_router_instance_up{instance_role="decode"} 1.0',
        'k3_router_finish_total{reason="stop"} 0.0',
        'k3_router_circuit_state{instance_id="decode-a"} 0.0',
        "k3_ready 1.0",
        "k3_draining 0.0",
    ):
        assert series in answer.text
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = await router.client.get("/metrics", headers=accept)
    assert answer.text.endswith("# EOF\n")


async def test_http_rules(router: RunningRouter) -> None:
    head = await router.client.head("/metrics")
    assert (head.status_code, head.content) == (200, b"")
    wrong = await router.client.get(TEXT)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    for path in ("/v1/embeddings", "/v1/responses", "/nowhere"):
        answer = await router.client.post(path, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert answer.headers["x-request-id"]


async def test_tokenize_and_detokenize_are_inverse(router: RunningRouter) -> None:
    async def post(path: str, **body: Any) -> dict[str, Any]:
        answer = await router.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    tokens = await post("/tokenize", prompt="Grüße <|sep|>", return_token_strs=True)
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 512
    assert tokens["tokens"][-1] == 3845
    text = await post("/detokenize", tokens=tokens["tokens"], skip_special_tokens=False)
    assert text == {"prompt": "Grüße <|sep|>"}
    assert await post("/detokenize", tokens=tokens["tokens"]) == {"prompt": "Grüße "}
    messages = [{"role": "user", "content": "hi"}]
    chat = await post("/tokenize", messages=messages)
    await router.client.post("/v1/chat/completions", json={"messages": messages})
    assert chat["tokens"] == list(router.decode.requests[-1].token_ids)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert (await post("/tokenize", messages=messages, tools=[tool]))["count"] > chat["count"]
    info = (await router.client.get("/tokenizer_info")).json()
    assert (info["eos_token"], info["eos_token_id"]) == ("<|end_of_msg|>", 3842)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [4096]}),
        ("/detokenize", {"tokens": "x"}),
    ],
)
async def test_bad_tokenizer_requests_are_refused(
    router: RunningRouter, path: str, body: dict[str, Any]
) -> None:
    answer = await router.client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


async def in_pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    """A body whose length is not said."""
    for piece in pieces:
        yield piece


async def test_operators_see_and_change_the_fleet(router: RunningRouter) -> None:
    second = await FakeEngine(instance_id="decode-b").start()
    async with httpx.AsyncClient(base_url=router.admin_url) as admin:
        entries = (await admin.get("/admin/instances")).json()
        assert [(e["id"], e["state"], e["circuit"]) for e in entries] == [
            ("prefill-a", "ready", "closed"),
            ("decode-a", "ready", "closed"),
        ]
        assert entries[1]["load"]["kv_total_tokens"] == 64 * 16
        assert entries[1]["parallel"] == {"tp": 1, "pp": 1, "cp": 1}
        body = {"role": "decode", "address": second.address}
        for _ in range(2):
            assert (await admin.post("/admin/instances", json=body)).status_code == 202
        registry = router.router.serving.registry
        await until(lambda: len(registry.decode_views()) == 2)
        drained = await admin.post("/admin/instances/decode-b/drain", json={"timeout_s": 1})
        assert (drained.status_code, drained.json()["draining"]) == (202, True)
        await until(lambda: len(registry.decode_views()) == 1)
        for sent in (b'{"timeout_s": "soon"}', in_pieces(b'{"timeout_s":', b' "soon"}')):
            bad = await admin.post("/admin/instances/decode-b/drain", content=sent, headers=JSON)
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "timeout_s")
        assert (await admin.post("/admin/instances/decode-b/undrain")).json()["draining"] is False
        await until(lambda: len(registry.decode_views()) == 2)
        assert (await admin.delete("/admin/instances/decode-b")).status_code == 202
        assert (await admin.delete("/admin/instances/decode-b")).status_code == 404
        flushed = (await admin.post("/admin/cache/flush")).json()
        assert flushed == [{"id": "prefill-a", "pages": 3, "checkpoints": 0}]
        assert (await admin.get("/admin/config")).json()["model"]["name"] == "tiny"
        bad = await admin.put("/admin/log_level", json={"level": "loud"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "level")
        for address in ("x", "here:0", "here:65536", "a b:1"):
            bad = await admin.post("/admin/instances", json={"role": "decode", "address": address})
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "address"), address
    assert (await router.client.get("/admin/instances")).status_code == 404
    await second.stop()


async def test_a_drain_finishes_what_runs_and_refuses_what_comes(folder: ModelFolder) -> None:
    async with running_router(folder) as router:
        router.decode.script = [[97], 0.3, [98]]
        running = asyncio.create_task(router.client.post(TEXT, json={"prompt": "x"}))
        await until(lambda: router.decode.n_running == 1)
        async with httpx.AsyncClient(base_url=router.admin_url) as admin:
            for _ in range(2):  # a caller may repeat itself
                answer = await admin.post("/admin/drain")
                assert (answer.status_code, answer.json()["phase"] != "running") == (202, True)
        serving = router.router.serving
        await until(lambda: serving.lifecycle.is_draining)
        router.router.drain.signal()  # the platform's own, once the drain is under way
        await until(lambda: serving.lifecycle.phase.value == "refusing")
        ready = await router.client.get("/ready")
        assert [reason["code"] for reason in ready.json()["reasons"]] == ["draining"]
        late = await router.client.post(TEXT, json={"prompt": "x"})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        assert (await running).json()["choices"][0]["text"] == "ab"


async def test_a_drain_waits_for_a_prompt_that_waits_to_be_tokenized(folder: ModelFolder) -> None:
    async with running_router(folder) as router:
        router.decode.script = [[97], 0.3, [98]]
        texts, free = router.router.serving.texts, threading.Event()
        busy = [
            asyncio.create_task(texts.run(lambda: free.wait(DEADLINE_S))) for _ in range(N_THREADS)
        ]
        waiting = asyncio.create_task(router.client.post(TEXT, json={"prompt": "x"}))
        await until(lambda: texts.n_open > N_THREADS)
        router.router.drain.signal()
        await until(lambda: router.router.serving.lifecycle.phase.value == "refusing")
        free.set()
        assert (await waiting).json()["choices"][0]["text"] == "ab"
        await asyncio.gather(*busy)


async def test_a_second_signal_ends_streams_with_an_error_event(folder: ModelFolder) -> None:
    async with running_router(folder) as router:
        router.decode.script = [[97], HOLD]
        body = {"prompt": "x", "stream": True}
        running = asyncio.create_task(router.client.post(TEXT, json=body))
        await until(lambda: router.decode.n_running == 1)
        router.router.drain.signal()
        router.router.drain.signal()
        text = (await running).text
        assert '"code":"draining"' in text
        assert "[DONE]" not in text


async def test_strict_parameters_refuse_unknown_fields(folder: ModelFolder) -> None:
    http = replace(HttpConfig(), strict_params=True, cors_origins=("https://a.example",))
    async with running_router(folder, http=http) as router:
        answer = await router.client.post(TEXT, json={"prompt": "x", "frobnicate": 1})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (
            400,
            "unknown_parameter",
            "frobnicate",
        )
        origin = {"origin": "https://a.example"}
        answer = await router.client.get("/health", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"


async def test_a_server_may_report_how_drafts_fared_without_being_asked(
    folder: ModelFolder,
) -> None:
    http = HttpConfig(per_request_spec_stats="summary")
    async with running_router(folder, http=http) as router:
        router.decode.script = [[5, 6, 7]]
        for speculation in (Speculation((1, 0, 1), 4), None):
            router.decode.speculation = speculation
            bodies = [
                (await router.client.post(TEXT, json={"prompt": "x"} | more)).json()
                for more in ({}, {"return_spec_stats": False}, {"n": 2})
            ]
            reported = [body.get("metrics") for body in bodies]
            assert reported[1:] == [None, None]
            if speculation is None:
                assert reported[0] is None
                continue
            statistics = reported[0]["speculative_decoding"]
            assert statistics["acceptance_histogram"] == [1, 0, 1]
            assert statistics["mean_acceptance_length"] == 2.0
            assert "per_step_accepted" not in statistics


def tokens_with(histogram: tuple[int, ...], n_drafts: int) -> decode_pb2.Tokens:
    """Two tokens of one step, and the drafts of all steps so far."""
    speculation = decode_pb2.Speculation(histogram=histogram, n_drafts=n_drafts)
    return decode_pb2.Tokens(
        tokens=[common_pb2.Token(id=5), common_pb2.Token(id=6)], speculation=speculation
    )


@pytest.mark.dspark
async def test_a_server_may_report_drafts_step_by_step(folder: ModelFolder) -> None:
    """The first token and the third step come without drafts: neither counts as a step."""
    counted = [((0, 0, 0), 0), ((0, 0, 1), 2), ((0, 0, 1), 2), ((1, 0, 1), 3)]
    http = HttpConfig(per_request_spec_stats="detailed")
    async with running_router(folder, http=http) as router:
        router.decode.script = [tokens_with(*count) for count in counted]
        router.decode.speculation = Speculation(*counted[-1])
        for more, is_reported in (({}, True), ({"return_spec_stats": False}, False)):
            body = (await router.client.post(TEXT, json={"prompt": "x"} | more)).json()
            assert ("metrics" in body) is is_reported
            if is_reported:
                statistics = body["metrics"]["speculative_decoding"]
                assert statistics["per_step_accepted"] == [2, 0]
                assert statistics["per_step_drafted"] == [2, 1]
                assert statistics["num_spec_steps"] == 2


@pytest.mark.dspark
async def test_a_request_may_ask_for_fewer_drafts(folder: Path) -> None:
    async with running_router(folder) as router:
        for more, most in (({}, None), ({"draft_tokens": 0}, 0), ({"draft_tokens": 3}, 3)):
            answer = await router.client.post(TEXT, json={"prompt": "x"} | more)
            assert answer.status_code == 200
            (asked,) = router.decode.requests[-1:]
            assert (asked.draft_tokens if asked.HasField("draft_tokens") else None) == most
        for wrong in (-1, 1.5, "3", True):
            answer = await router.client.post(TEXT, json={"prompt": "x", "draft_tokens": wrong})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "draft_tokens"


def test_the_router_holds_neither_torch_nor_much_memory() -> None:
    program = (
        "import sys, router.__main__, router.text.folder as f, pathlib\n"
        "folder = f.load_model_folder(pathlib.Path(sys.argv[1]), 'tiny')\n"
        "bad = {'torch', 'transformers', 'nixl', 'numpy'} & sys.modules.keys()\n"
        "peak = pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]\n"
        "print(int(peak) // 1024, sorted(bad))\n"
    )
    tiny = Path(__file__).parents[3] / "k3" / "assets" / "tiny"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    resident_mb, modules = done.stdout.split(maxsplit=1)
    assert modules.strip() == "[]"
    assert int(resident_mb) < 120


def test_listening_sockets_let_asyncio_turn_delayed_writes_off() -> None:
    with bind("127.0.0.1", 0, "http.port") as sock:
        assert sock.proto == socket.IPPROTO_TCP


def test_a_taken_port_and_an_address_of_others_are_told_apart() -> None:
    with bind("127.0.0.1", 0, "http.port") as sock:
        port = sock.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"http\.admin_port={port}: .* is free, for example"):
            bind("127.0.0.1", port, "http.admin_port")
    with pytest.raises(ConfigError, match="give an address of this machine"):
        bind("192.0.2.77", 8000, "http.port")
