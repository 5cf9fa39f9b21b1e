"""Real ranks under a real front: they come up, answer, and end together, whatever ends them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from k3.config import load
from k3.config.commandline import ENGINE_ALIASES, parse
from k3.config.tree import EngineConfig
from k3.errors import GroupFailed, ModelError
from k3.rank.channel import AsyncChannel
from k3.rank.supervise import RankGroup
from k3.v1 import plan_pb2

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "k3"
START_S = 120.0


def make_config(folder: Path = GOLDEN, **sections: object) -> EngineConfig:
    argv = ["--model", str(folder), "--cache-pages", "8", "--cache-page-tokens", "4"]
    line = parse("k3-prefill", EngineConfig, ENGINE_ALIASES, argv)
    config = load.load_engine("prefill", line, {}).require()
    return replace(config, **sections)


def make_group(config: EngineConfig) -> RankGroup:
    setup = plan_pb2.Setup(
        instance_id="prefill-test",
        config_json=load.to_json(config),
        n_pages=config.cache.pages,
        n_slots=config.cache.state_slots,
    )
    return RankGroup("prefill", config, setup, 1, on_progress=lambda _rank, _progress: None)


@asynccontextmanager
async def running(config: EngineConfig | None = None) -> AsyncIterator[tuple[RankGroup, int]]:
    """A started group of one rank, and the rank's process id; nothing of it is left afterwards."""
    group = make_group(config or make_config())
    await group.start(START_S)
    pid = group.pids[0]
    try:
        yield group, pid
    finally:
        await group.stop(2.0)
        assert not is_alive(pid)
        assert not is_open(group)


def is_open(group: RankGroup) -> bool:
    """Whether somebody listens at the group's door."""
    name = str(group.address).removeprefix("unix:")
    lines = Path("/proc/net/unix").read_text().splitlines()
    return any(line.endswith(name) and line.split()[3] == "00010000" for line in lines)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened within {limit_s} s"
        await asyncio.sleep(0.05)


async def failure(call: Callable[[], Awaitable[object]], limit_s: float) -> None:
    """Call until it raises."""
    async with asyncio.timeout(limit_s):
        while True:
            await call()


def plan(step_id: int) -> plan_pb2.StepPlan:
    chunk = plan_pb2.ChunkRow(
        request=7,
        epoch=1,
        token_ids=[1, 2, 3],
        is_final=True,
        pages=[1],
        read_slot=-1,
        write_slot=1,
    )
    return plan_pb2.StepPlan(step_id=step_id, chunks=[chunk], group_len=1)


async def test_a_group_answers_plans_in_order_and_leaves_nothing_behind():
    async with running() as (group, _pid):
        for step_id in (1, 2, 3):
            await group.send_plan(plan(step_id))
        results = [await group.next_result() for _ in range(3)]
        assert [result.step_id for result in results] == [1, 2, 3]
        assert results[0].rows[0].request == 7
        rank, status = await group.next_status()
        assert (rank, status.WhichOneof("status")) == (0, "heartbeat")


async def test_a_killed_rank_fails_every_wait_with_its_number_and_signal():
    async with running() as (group, pid):
        waiting = asyncio.create_task(group.next_result())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            GroupFailed, match="rank 0 of prefill is lost: it ended with signal SIGKILL"
        ):
            async with asyncio.timeout(5):
                await waiting
        with pytest.raises(GroupFailed, match="SIGKILL"):
            await group.send_plan(plan(1))


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
async def test_a_rank_leaves_polite_signals_to_its_front(sent: signal.Signals):
    async with running() as (group, pid):
        os.kill(pid, sent)
        await group.send_plan(plan(1))
        assert (await group.next_result()).step_id == 1


async def test_a_failed_step_fails_the_group_with_the_ranks_own_words():
    async with running() as (group, _pid):
        await group.send_plan(plan(5))
        with pytest.raises(GroupFailed, match=r"rank 0 failed: .*plan 5 came after plan 0"):
            async with asyncio.timeout(5):
                await group.next_result()


async def test_a_stopped_rank_is_noticed_by_its_silence():
    async with running() as (group, pid):
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(
            GroupFailed, match="rank 0 of prefill is lost: no sign of life for 10 s"
        ):
            await failure(group.next_status, 15)


async def test_an_unanswered_plan_fails_the_group_and_leaves_stacks_in_the_log(
    caplog: pytest.LogCaptureFixture,
):
    config = make_config()
    config = replace(config, schedule=replace(config.schedule, plan_timeout_s=1.0))
    caplog.set_level(logging.INFO, "k3.rank")
    async with running(config) as (group, pid):
        os.kill(pid, signal.SIGSTOP)
        await group.send_plan(plan(1))
        with pytest.raises(GroupFailed, match="plan_timeout_s=1 s"):
            await failure(group.next_result, 10)
        assert "most recent call first" in caplog.text
        assert "mover.py" in caplog.text


async def test_a_model_that_does_not_fit_keeps_its_type(tmp_path: Path):
    (tmp_path / "config.json").write_bytes((GOLDEN / "config.json").read_bytes())
    group = make_group(make_config(tmp_path))
    with pytest.raises(ModelError, match="safetensors"):
        await group.start(START_S)
    assert not is_open(group)


async def test_a_stranger_is_refused_and_the_door_closes_behind_the_ranks():
    group = make_group(make_config())
    starting = asyncio.create_task(group.start(START_S))
    try:
        await until(lambda: is_open(group), 10.0)
        channel = AsyncChannel(*await asyncio.open_unix_connection(group.address.path))
        hello = plan_pb2.Hello(rank=0, token="guess", connection=plan_pb2.CONNECTION_PLAN)
        await channel.send(plan_pb2.RankMessage(hello=hello), 5.0)
        with pytest.raises(EOFError):
            async with asyncio.timeout(5):
                await channel.receive(plan_pb2.FrontMessage)
        channel.close()
        await starting
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_unix_connection(group.address.path)
    finally:
        await group.stop(2.0)


async def test_a_mover_that_fails_ends_its_rank():
    async with running() as (group, _pid):
        await group.command(0, plan_pb2.TransferCommand())
        with pytest.raises(GroupFailed, match="transfer command without content"):
            await failure(group.next_status, 5)


FRONT = """
import asyncio, sys
sys.path.insert(0, {root!r})
from tests.e2e.test_rank_group import make_config, make_group, START_S

async def main():
    group = make_group(make_config())
    await group.start(START_S)
    print(group.pids[0], flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_ranks_do_not_outlive_a_killed_front():
    front = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FRONT.format(root=str(ROOT)), stdout=asyncio.subprocess.PIPE
    )
    assert front.stdout is not None
    async with asyncio.timeout(START_S):
        pid = int(await front.stdout.readline())
    assert is_alive(pid)
    front.kill()
    await front.wait()
    await until(lambda: not is_alive(pid), 5.0)
