"""The server of a benchmark: awaited while it starts, named with its reason when it never gets ready."""

from __future__ import annotations

import argparse
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from k3.bench.target import address, await_ready, why_not_ready
from k3.errors import K3Error


class Router(HTTPServer):
    """Answers /ready with the statuses given, the last one for ever."""

    statuses: list[int]


class Handler(BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        statuses = self.server.statuses
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{"reasons": [{"code": "NO_DECODE"}]}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def url(router: Router) -> str:
    return f"http://127.0.0.1:{router.server_address[1]}"


def test_a_server_is_awaited_while_it_starts(router: Router) -> None:
    router.statuses = [503, 200]
    said = io.StringIO()
    await_ready(url(router), 60.0, Console(file=said))
    assert "waiting up to 60 s" in said.getvalue()


def test_one_that_never_gets_ready_is_named_with_its_reason(router: Router) -> None:
    router.statuses = [503]
    with pytest.raises(K3Error, match=r"HTTP 503.*NO_DECODE.*--local"):
        await_ready(url(router), 0.0, Console(file=io.StringIO()))


def test_nobody_there_is_said() -> None:
    reason = why_not_ready("http://127.0.0.1:9")
    assert reason is not None
    assert "ConnectError" in reason


@pytest.mark.parametrize("text", ["http://[::1", "127.0.0.1:8000", "ftp://a", "http://", ""])
def test_an_address_that_is_none_is_refused_at_once(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        address(text)


@pytest.mark.parametrize("behind", ["", "/", "/v1", "/v1/"])
def test_the_address_of_the_api_names_its_server(behind: str) -> None:
    assert address(f"http://127.0.0.1:8000{behind}") == "http://127.0.0.1:8000"
