"""Bytes on the router's port that no client of good will sends: every answer is an error object, none is a 500, and
nothing unfinished is kept.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from k3.rpc import unread
from router import connection
from router.openai import body
from tests.unit.router.conftest import RunningRouter, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
WAIT_S = 10.0


async def exchange(target: RunningRouter, *pieces: bytes) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to raw bytes; the connection must be closed by the router."""
    host, port = target.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(WAIT_S):
            try:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                answer = await reader.read()
            except ConnectionResetError:
                answer = b""
        head, _, text = answer.partition(b"\r\n\r\n")
        return (int(head.split()[1]), json.loads(text)) if head else (0, {})
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff\x00\xff\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"PRI * HTTP/2.0\r\n\r\n",
    ],
    ids=["noise", "tls", "http2"],
)
async def test_what_is_not_http_gets_an_error_object(
    module_router: RunningRouter, data: bytes
) -> None:
    status, answer = await exchange(module_router, data + b"\r\n\r\n")
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_a_head_without_end_is_cut_off(module_router: RunningRouter) -> None:
    endless = [b"GET /health HTTP/1.1\r\nX: ", *[b"y" * 100_000] * 10]
    status, _ = await exchange(module_router, *endless)
    assert status in (0, 431)  # 0: reset while we were still sending
    assert (await module_router.client.get("/health")).status_code == 200


async def test_a_head_that_takes_too_long_is_given_up(
    module_router: RunningRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.05)
    for start in (b"", b"\r\n", b"GET /health HTTP/1.1\r\n"):
        status, answer = await exchange(module_router, start)
        assert (status, answer["error"]["type"]) == (408, "timeout_error")


async def test_a_body_that_takes_too_long_is_given_up(
    module_router: RunningRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "BODY_S", 0.05)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
        "Connection: close\r\n\r\n{"
    )
    status, answer = await exchange(module_router, head.encode())
    assert (status, answer["error"]["code"]) == (408, "request_timeout")


async def test_a_client_that_reads_nothing_is_given_up(
    module_router: RunningRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More is written than socket buffers take, and the deadline of the request is minutes away."""
    monkeypatch.setattr(unread, "HTTP_S", 0.05)
    module_router.decode.script = [[97] * 200] * 20_000
    text = json.dumps({"prompt": "x", "stream": True, "logprobs": 0})
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = module_router.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        client.sendall((head + text).encode())
        requests = module_router.router.serving.requests
        await until(lambda: len(requests) == 1, "the request is open")
        await until(lambda: len(requests) == 0, "the request has ended")
        await until(lambda: module_router.decode.n_running == 0, "its call has ended")
    module_router.decode.reset()


async def test_a_large_body_is_no_large_head(module_router: RunningRouter) -> None:
    text = "a" * 3 * connection.MAX_HEAD_BYTES
    answers = [
        await module_router.client.post("/tokenize", json={"prompt": text}) for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]


def nested(depth: int, opening: str, closing: str) -> str:
    return opening * depth + "1" + closing * depth


@pytest.mark.parametrize(
    "arguments",
    [
        json.dumps('{"a":' + nested(100_000, "[", "]") + "}"),
        nested(1015, '{"a":', "}"),
        nested(900, '{"a":', "}"),
        json.dumps('{"a":NaN,"b":"\\ud800","c":1e999}'),
        json.dumps('{"a":' + "9" * 6000 + "}"),
    ],
    ids=["deep text", "too deep", "deep", "odd numbers", "long number"],
)
async def test_tool_calls_of_any_depth_are_rendered_or_refused(
    module_router: RunningRouter,
    arguments: str,
) -> None:
    messages = (
        '[{"role":"user","content":"hi"},{"role":"assistant","tool_calls":[{"id":"a","type":"function",'
        f'"function":{{"name":"f","arguments":{arguments}}}}}]}}]'
    )
    answer = await post(module_router, "/tokenize", '{"messages":' + messages + "}")
    assert answer in (200, 400)


async def test_tools_of_any_depth_are_rendered_or_refused(module_router: RunningRouter) -> None:
    for depth in (10, 500, 900, 1000, 1020):
        tools = '[{"f":' + nested(depth, '{"a":', "}") + "}]"
        text = '{"messages":[{"role":"user","content":"hi"}],"tools":' + tools + "}"
        assert await post(module_router, "/tokenize", text) in (200, 400), f"depth {depth}"


async def post(target: RunningRouter, path: str, text: str) -> int:
    headers = {"Content-Type": "application/json"}
    answer = await target.client.post(path, content=text.encode(), headers=headers)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.status_code
