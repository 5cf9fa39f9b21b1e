"""Strangers at the socket through which ranks dial back: each is sent away at once, and the group comes up."""

from __future__ import annotations

import asyncio
import socket

import pytest

from k3.rank.channel import LENGTH, encode
from k3.rank.supervise import RankGroup
from k3.v1 import plan_pb2
from tests.e2e.test_rank_group import START_S, make_config, make_group

WAIT_S = 20.0
PLAN = plan_pb2.CONNECTION_PLAN


def hello(**fields: object) -> bytes:
    values = {"rank": 0, "connection": PLAN, "token": "guess", **fields}
    return encode(plan_pb2.RankMessage(hello=plan_pb2.Hello(**values)))  # type: ignore[arg-type]


STRANGERS = {
    "wrong token": hello(),
    "token beyond ASCII": hello(token="\u00e9" * 16),
    "no token": hello(token=""),
    "rank of nobody": hello(rank=2**32 - 1),
    "no hello": encode(plan_pb2.RankMessage(ready=plan_pb2.RankReady())),
    "noise": LENGTH.pack(4) + b"\xff" * 4,
    "frame without bound": LENGTH.pack(2**32 - 1) + b"x",
    "silence and an end": b"",
}


async def dial(group: RankGroup) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect as soon as the group listens."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await asyncio.open_unix_connection(group.address.path)
            except ConnectionRefusedError:
                await asyncio.sleep(0.005)


@pytest.mark.timeout(120)
async def test_strangers_are_sent_away_and_the_group_comes_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = make_group(make_config())
    start = asyncio.create_task(group.start(START_S))
    try:
        for name, data in STRANGERS.items():
            reader, writer = await dial(group)
            writer.write(data)
            if not data:
                writer.write_eof()
            async with asyncio.timeout(WAIT_S):
                try:
                    assert await reader.read() == b"", f"{name} was answered"
                except ConnectionResetError:
                    pass
                except TimeoutError as error:
                    raise AssertionError(f"{name} was not sent away") from error
            writer.close()
        assert len(await start) == 1
        with (
            socket.socket(socket.AF_UNIX) as late,
            pytest.raises(ConnectionRefusedError),
        ):
            late.connect(group.address.path)
        assert [r.getMessage() for r in caplog.records if r.name == "asyncio"] == []
    finally:
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await group.stop(2.0)
