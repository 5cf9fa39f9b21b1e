"""The ops port beyond the probes: pages of the service's own, by path, with their query."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping

import pytest

from k3.rpc import unread
from k3.rpc.ops import Answer, OpsApp, OpsServer
from k3.rpc.server import bound_socket


class Source:
    """Probes that nobody asks here."""

    def health(self) -> Answer:
        raise AssertionError("not asked")

    ready = startup = version = health


def echo(query: Mapping[str, str]) -> Answer:
    return Answer(200 if query else 400, {"query": dict(query)})


async def get(path: str, query: str = "", method: str = "GET") -> tuple[int, dict[str, object]]:
    app = OpsApp(Source(), {"/admin/echo": echo})  # type: ignore[arg-type]
    sent: list[dict[str, object]] = []

    async def receive():
        raise AssertionError("nothing is read")

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": []}
    await app(scope | {"query_string": query.encode()}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def test_a_page_gets_the_query_and_chooses_the_status() -> None:
    assert await get("/admin/echo", "request_id=a%20b&x=1") == (
        200,
        {"query": {"request_id": "a b", "x": "1"}},
    )
    assert await get("/admin/echo") == (400, {"query": {}})


async def test_unknown_paths_name_the_pages_and_other_methods_are_refused() -> None:
    status, body = await get("/admin/other")
    assert status == 404
    assert "/admin/echo" in body["error"]["message"]
    status, body = await get("/admin/echo", method="POST")
    assert status == 405


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_scraper_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """More is asked for than socket buffers take."""
    monkeypatch.setattr(unread, "HTTP_S", 0.05)
    sock = bound_socket("127.0.0.1", 0)
    pages = {"/large": lambda _query: Answer(200, {"text": "x" * 1_000_000})}
    server = OpsServer(Source(), sock, pages)  # type: ignore[arg-type]
    serving = asyncio.create_task(server.run_until_stopped())
    state = server.server_state
    await until(lambda: server.started)
    with sock, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(sock.getsockname())
        client.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n" * 16)
        await until(lambda: state.total_requests > 0 and not state.connections)
        assert state.total_requests < 16
        server.stop()
        await serving
