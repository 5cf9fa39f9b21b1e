"""Pairs of instances and the allow-list of addresses."""

import asyncio

import pytest

from decode_svc.intake.source import Pair, Pairs, is_allowed
from k3.errors import ReconnectRequired, Unavailable
from k3.v1 import prefill_pb2


@pytest.mark.parametrize(
    ("address", "patterns", "allowed"),
    [
        ("127.0.0.1:50051", ("127.0.0.1:*",), True),
        ("127.0.0.2:50051", ("127.0.0.1:*",), False),
        ("10.0.0.7:50051", ("*:50051",), True),
        ("10.0.0.7:50052", ("*:50051",), False),
        ("p-0.prefill.svc:50051", ("*.prefill.svc:50051",), True),
        ("prefill.svc:50051", ("*.prefill.svc:50051",), False),
        ("evilprefill.svc:50051", ("*.prefill.svc:*",), False),
        ("anything:1", ("*:*",), True),
        ("anything:1", ("*",), False),
        ("host", ("host:*",), False),
        ("host:abc", ("host:*",), False),
        (":1", ("*:*",), False),
        ("a:1", (), False),
        ("unix:/tmp/x", ("127.0.0.1:*",), False),
    ],
)
def test_only_allowed_addresses_are_dialled(
    address: str, patterns: tuple[str, ...], allowed: bool
) -> None:
    assert is_allowed(address, patterns) is allowed


class Source:
    def __init__(self) -> None:
        self.n_connects = 0
        self.gate = asyncio.Event()
        self.fails = False
        self.results: list[str] = []

    async def connect(self, address: str) -> Pair:
        self.n_connects += 1
        await self.gate.wait()
        if self.fails:
            raise Unavailable("nobody there")
        return Pair(address, f"p{self.n_connects}", prefill_pb2.Geometry())


async def test_callers_that_come_together_share_one_connect() -> None:
    source = Source()
    pairs = Pairs(source, source.results.append)  # type: ignore[arg-type]
    waiting = [asyncio.create_task(pairs.get("a:1")) for _ in range(5)]
    await asyncio.sleep(0)
    source.gate.set()
    found = await asyncio.gather(*waiting)
    assert source.n_connects == 1
    assert len({pair.instance_id for pair in found}) == 1


async def test_a_caller_that_leaves_does_not_end_the_connect_of_the_others() -> None:
    source = Source()
    pairs = Pairs(source, source.results.append)  # type: ignore[arg-type]
    first, second = (asyncio.create_task(pairs.get("a:1")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    source.gate.set()
    assert (await second).address == "a:1"
    assert source.n_connects == 1


async def test_a_failed_connect_is_tried_again_by_the_next_caller() -> None:
    source = Source()
    source.gate.set()
    source.fails = True
    pairs = Pairs(source, source.results.append)  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        await pairs.get("a:1")
    source.fails = False
    assert (await pairs.get("a:1")).instance_id == "p2"
    assert source.results == ["failed", "ok"]


async def test_only_the_outdated_pair_is_forgotten() -> None:
    source = Source()
    source.gate.set()
    pairs = Pairs(source, source.results.append)  # type: ignore[arg-type]
    old = await pairs.get("a:1")
    pairs.forget(old)
    new = await pairs.get("a:1")
    pairs.forget(old)
    assert await pairs.get("a:1") == new
    assert source.n_connects == 2


async def test_callers_of_a_connect_that_was_dropped_are_told_to_connect_again() -> None:
    source = Source()
    pairs = Pairs(source, source.results.append)  # type: ignore[arg-type]
    waiting = asyncio.create_task(pairs.get("a:1"))
    await asyncio.sleep(0)
    pairs.forget_all()
    with pytest.raises(ReconnectRequired):
        await waiting


async def test_a_caller_that_is_cancelled_while_its_connect_is_dropped_stays_cancelled() -> None:
    source = Source()
    pairs = Pairs(source, source.results.append)  # type: ignore[arg-type]
    waiting = asyncio.create_task(pairs.get("a:1"))
    await asyncio.sleep(0)
    pairs.forget_all()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
