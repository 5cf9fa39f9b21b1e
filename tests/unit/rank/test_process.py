"""A rank's environment and its output in our log."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace

import pytest

from k3.config.tree import EngineConfig, ModelConfig, TransferConfig
from k3.rank.process import TOKEN_VARIABLE, RankProcess, environment
from k3.transfer.agent import BATCHES


def test_a_rank_inherits_the_environment_and_the_users_choice_wins(monkeypatch):
    monkeypatch.setenv("UCX_TCP_USER_TIMEOUT", "9s")
    monkeypatch.setenv("UCX_TLS", "self,tcp")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = EngineConfig()
    found = environment(replace(config, backends=replace(config.backends, threads=3)), "secret")
    assert found["UCX_TCP_USER_TIMEOUT"] == "9s"
    assert found["UCX_TLS"] == "self,tcp"
    assert found["OMP_NUM_THREADS"] == "3"
    assert found[TOKEN_VARIABLE] == "secret"
    assert "UCX_TCP_PORT_RANGE" not in found


def test_transports_are_left_to_the_library_unless_the_user_chose(monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.delenv("UCX_TCP_USER_TIMEOUT", raising=False)
    config = replace(EngineConfig(), transfer=TransferConfig(port_range="41000-41050"))
    found = environment(config, "secret")
    assert "UCX_TLS" not in found
    assert found["UCX_TCP_USER_TIMEOUT"] == "5s"
    assert found["UCX_TCP_PORT_RANGE"] == "41000-41050"


@pytest.mark.parametrize(
    ("device", "given", "found"),
    [("cuda", None, "1"), ("cuda", "0", "0"), ("cpu", None, None)],
)
def test_a_rank_on_a_gpu_begins_with_batches_on_unless_the_user_chose(
    monkeypatch, device, given, found
):
    monkeypatch.delenv(BATCHES, raising=False)
    if given is not None:
        monkeypatch.setenv(BATCHES, given)
    config = replace(EngineConfig(), model=ModelConfig(device=device))
    assert environment(config, "secret").get(BATCHES) == found


async def test_output_is_logged_under_the_ranks_number_at_the_level_it_names(caplog):
    caplog.set_level(logging.DEBUG, "k3.rank")
    said = "WARNING k3.transfer: lost\\nplain words\\nERROR k3.rank: bad\\nunfinished"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"import sys; sys.stdout.write('{said}'); sys.exit(3)"),
        stdout=asyncio.subprocess.PIPE,
    )
    rank = RankProcess(5, process)
    async with asyncio.timeout(30):
        await rank.forward_output()
        assert await rank.wait() == 3
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "rank 5: k3.transfer: lost"),
        ("INFO", "rank 5: plain words"),
        ("ERROR", "rank 5: k3.rank: bad"),
        ("INFO", "rank 5: unfinished"),
    ]
    assert rank.last_output == "unfinished"
    assert rank.end == "exit code 3"


async def test_a_line_without_end_is_bounded():
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import sys; sys.stdout.write('x' * 1_000_000)"),
        stdout=asyncio.subprocess.PIPE,
    )
    rank = RankProcess(0, process)
    async with asyncio.timeout(30):
        await rank.forward_output()
        await rank.wait()
    assert set(rank.last_output) == {"x"}
    assert len(rank.last_output) <= 1 << 16


@pytest.mark.parametrize(("code", "text"), [(0, "exit code 0"), (-9, "signal SIGKILL")])
async def test_an_end_is_told_in_words(code, text):
    source = "import os; os.kill(os.getpid(), 9)" if code < 0 else ""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", source)
    rank = RankProcess(0, process)
    async with asyncio.timeout(30):
        await rank.wait()
    assert rank.end == text
    assert not rank.is_running
