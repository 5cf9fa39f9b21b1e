"""The ops port beyond the probes: pages of the service's own, by path, with their query."""

from __future__ import annotations

import json
from collections.abc import Mapping

from k3.rpc.ops import Answer, OpsApp


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
