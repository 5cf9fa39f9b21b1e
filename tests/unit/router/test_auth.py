"""Keys: who gets in, what stays open, and that callers do not share a cache."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL
from pathlib import Path

import httpx
import pytest

from k3.config.api_keys import read_keys, unusable_keys
from k3.config.router_sections import HttpConfig
from router.auth import Keys
from router.openai.params import cache_salt
from router.text.folder import ModelFolder
from tests.unit.router.conftest import running_router

pytestmark = pytest.mark.prefill

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0}


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(f"# people\n{ALICE}\n\n  {BOB}  \n")
    return str(path)


def test_a_file_holds_one_key_a_line(key_file: str) -> None:
    assert read_keys(key_file) == (ALICE, BOB)
    assert unusable_keys("") is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no key"),
        ("short\n", "line 1"),
        (f"{ALICE}\na key with blanks in it\n", "line 2"),
        (f"# people\n{ALICE}\nschlüssel-0123456789\n", "line 3"),
    ],
)
def test_a_file_of_bad_keys_is_refused_without_naming_them(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    told = unusable_keys(str(path))
    assert told is not None
    assert problem in told
    assert "short" not in told.removeprefix(str(path))


def test_a_principal_is_the_same_for_the_same_key_and_tells_nothing_of_it() -> None:
    keys = Keys([ALICE, BOB])
    alice = keys.principal(f"Bearer {ALICE}")
    assert alice == Keys([ALICE]).principal(f"bearer  {ALICE}")
    assert alice != keys.principal(f"Bearer {BOB}")
    assert len(alice or b"") == 32
    for wrong in ("", "Bearer", "Bearer ", f"Basic {ALICE}", ALICE, f"Bearer {ALICE}x"):
        assert keys.principal(wrong) is None


def test_salts_of_callers_never_meet_whatever_they_ask_for() -> None:
    alice, bob = Keys([ALICE]).principal(f"Bearer {ALICE}"), b"b" * 32
    assert alice is not None
    salts = {
        cache_salt(principal, asked)
        for principal in (b"", alice, bob)
        for asked in (None, "x", alice.hex(), alice.decode("latin-1"))
    }
    assert len(salts) == 3 * 4
    assert cache_salt(b"", None) == cache_salt(b"", "") == b""


async def test_generation_needs_a_key_and_probes_do_not(folder: ModelFolder, key_file: str) -> None:
    async with running_router(folder, http=HttpConfig(api_key_file=key_file)) as router:
        router.decode.script = [[5]]
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await router.client.get(path)).status_code == 200, path
        for path in ("/v1/models", "/v1/models/tiny", "/tokenizer_info", "/nowhere"):
            assert (await router.client.get(path)).status_code == 401, path
        answer = await router.client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-request-id"]
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.json()["error"]["type"] == "authentication_error"
        headers = {"Authorization": "Bearer not-a-key-of-this-server"}
        answer = await router.client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 401
        metrics = (await router.client.get("/metrics")).text
        assert 'k3_router_errors_total{code="invalid_api_key"} 6.0' in metrics
        for key in (ALICE, BOB, ALICE):
            headers = {"Authorization": f"Bearer {key}"}
            answer = await router.client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == 200, answer.text
        salts = [request.salt for request in router.decode.requests]
        assert salts[0] == salts[2] != salts[1]


async def test_the_question_of_helm_test_brings_the_first_key_of_a_file(
    folder: ModelFolder, key_file: str
) -> None:
    async def ask(*flags: str) -> int:
        command = (sys.executable, "-m", "k3.ask", "--url", router.url, "--max-tokens", "2", *flags)
        child = await asyncio.create_subprocess_exec(
            *command, "hello", stdout=DEVNULL, stderr=DEVNULL
        )
        return await asyncio.wait_for(child.wait(), 10.0)

    async with running_router(folder, http=HttpConfig(api_key_file=key_file)) as router:
        router.decode.script = [[97]]
        assert await ask() == 1
        assert await ask("--api-key-file", key_file) == 0


async def test_the_admin_port_has_keys_of_its_own(folder: ModelFolder, key_file: str) -> None:
    http = HttpConfig(admin_key_file=key_file)
    async with (
        running_router(folder, http=http) as router,
        httpx.AsyncClient(base_url=router.admin_url, timeout=10.0) as admin,
    ):
        assert (await admin.get("/admin/instances")).status_code == 401
        headers = {"Authorization": f"Bearer {BOB}"}
        assert (await admin.get("/admin/instances", headers=headers)).status_code == 200
        assert (await router.client.get("/v1/models")).status_code == 200


async def test_metrics_ask_for_a_key_when_told_to(folder: ModelFolder, key_file: str) -> None:
    http = HttpConfig(api_key_file=key_file, metrics_auth=True)
    async with running_router(folder, http=http) as router:
        assert (await router.client.get("/metrics")).status_code == 401
        headers = {"Authorization": f"Bearer {BOB}"}
        assert (await router.client.get("/metrics", headers=headers)).status_code == 200
        assert (await router.client.get("/ready")).status_code == 200
