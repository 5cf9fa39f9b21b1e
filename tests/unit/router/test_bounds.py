"""What a client names, sends and waits for is bounded, and only probes are open."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from prometheus_client import generate_latest

from k3.config.router_sections import HttpConfig
from k3.telemetry.metrics import RouterMetrics
from router.__main__ import MAX_UNKNOWN_FIELDS, UnknownFields
from router.openai.body import ARRIVING
from router.openai.params import MAX_SESSION_CHARS, cache_salt, session_of, timeout_s
from router.text.folder import ModelFolder
from tests.unit.router.conftest import DEADLINE_S, running_router

JSON = {"Content-Type": "application/json"}


def test_clients_lower_the_deadline_of_a_request_and_never_raise_it() -> None:
    assert timeout_s(None, None, 600.0) == 600.0
    assert timeout_s(700_000, "900000", 600.0) == 600.0
    assert timeout_s(50, "70", 600.0) == timeout_s(70, "50", 600.0) == 0.05


def test_of_a_session_s_name_the_beginning_counts() -> None:
    long = "s" * MAX_SESSION_CHARS
    assert session_of({"x-session-affinity": long + "and more"}) == long
    assert session_of({"x-session-id": "here"}) == "here"
    assert session_of({}) == ""


def test_only_so_many_unknown_fields_are_counted_by_name_and_names_are_cut() -> None:
    metrics = RouterMetrics()
    count = UnknownFields(metrics)
    count("x" * 100)
    for i in range(MAX_UNKNOWN_FIELDS + 4):
        count(f"field{i}")
    count("field0")
    text = generate_latest(metrics.registry).decode()
    assert f'{{field="{"x" * 64}"}} 1.0' in text
    assert '{field="field0"} 2.0' in text
    assert '{field="other"} 5.0' in text
    assert text.count("k3_router_unknown_params_total{") == MAX_UNKNOWN_FIELDS + 1


def test_what_a_caller_asks_for_is_not_taken_for_the_end_of_another_s_name() -> None:
    assert len({cache_salt(b"a" * n, "a" * (40 - n)) for n in (0, 8, 32, 40)}) == 4


async def test_a_body_that_says_it_is_too_large_is_not_waited_for(folder: ModelFolder) -> None:
    async with running_router(folder, http=HttpConfig(max_body_bytes=1000)) as router:
        host, port = router.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 1001\r\n\r\n"
        writer.write(head.encode())
        line = await asyncio.wait_for(reader.readline(), DEADLINE_S)
        writer.close()
        assert line.split()[1] == b"413"


async def test_bodies_that_are_still_arriving_are_bounded_in_bytes_not_in_number(
    folder: ModelFolder,
) -> None:
    http, body = HttpConfig(max_body_bytes=100), b'{"prompt": "a"}'
    head = (
        "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        "Content-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    )
    async with running_router(folder, http=http) as router, asyncio.timeout(DEADLINE_S):
        host, port = router.url.removeprefix("http://").split(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(ARRIVING + 3)]
        for reader, writer in slow:
            writer.write(head.encode())
            assert (await reader.readline()).split()[1] == b"100"  # its body is awaited now
            writer.write(b"{")  # and comes byte by byte: nobody is refused for that
        accepted = await router.client.post("/tokenize", content=body, headers=JSON)
        assert accepted.status_code == 200
        for _, writer in slow[:ARRIVING]:
            writer.write(b" " * 98)
        while True:  # until the router has read them
            refused = await router.client.post("/tokenize", content=body, headers=JSON)
            if refused.status_code != 200:
                break
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "queue_full"
        for path in ("/health", "/ready", "/metrics"):
            assert (await router.client.get(path)).status_code == 200, path
        async with httpx.AsyncClient(base_url=router.admin_url) as admin:
            level = await admin.put("/admin/log_level", json={"level": "info"})
            assert level.status_code == 202
        for _, writer in slow:
            writer.close()
        while True:  # the room comes back
            again = await router.client.post("/tokenize", content=body, headers=JSON)
            if again.status_code == 200:
                break


@pytest.mark.parametrize("path", ["/health/", "/healthy", "/ready/v1/models", "/metrics/x"])
async def test_only_the_paths_of_probes_themselves_are_open(
    folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory, path: str
) -> None:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("alice-0123456789abcdef\n")
    async with running_router(folder, http=HttpConfig(api_key_file=str(keys))) as router:
        assert (await router.client.get(path)).status_code == 401
