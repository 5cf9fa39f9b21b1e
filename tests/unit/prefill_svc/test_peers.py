"""Introductions: what is compared, in which order, and what becomes of a peer."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace

import pytest

from k3.errors import LayoutMismatch, QueueFull, ReconnectRequired, RequestRejected, Unavailable
from k3.v1 import plan_pb2, prefill_pb2
from prefill_svc import peers as peers_module
from prefill_svc.peers import MAX_METADATA_BYTES, Peers
from tests.sim.prefill_ranks import Clock, Movers, Pairing, connect, connect_request, identity


class World:
    def __init__(self, n_ranks: int = 2, pairing: Pairing | None = None) -> None:
        self.clock, self.movers = Clock(), Movers(n_ranks)
        self.peers = Peers(
            identity(), pairing or Pairing(), n_ranks, self.movers.command, self.clock
        )

    async def connect(self, instance_id: str = "d1", agents: str = "a") -> None:
        await connect(self.peers, self.movers, connect_request(instance_id, agents=agents))

    def count(self, kind: str) -> int:
        return sum(command.HasField(kind) for _, command in self.movers.commands)  # type: ignore[arg-type]


async def test_a_peer_is_usable_only_after_every_rank_has_connected() -> None:
    world = World()
    task = asyncio.create_task(world.peers.connect(connect_request("d1")))
    await asyncio.sleep(0)
    with pytest.raises(ReconnectRequired, match="call Connect"):
        world.peers.find("d1")
    peer_id = world.movers.commands[0][1].connect_peer.peer_id
    world.peers.on_connected(0, plan_pb2.PeerConnected(peer_id=peer_id))
    await asyncio.sleep(0)
    assert not task.done()
    world.peers.on_connected(1, plan_pb2.PeerConnected(peer_id=peer_id))
    response = await task
    assert response.instance_id == "prefill-1"
    assert world.peers.find("d1").peer_id == peer_id


async def test_connecting_twice_with_the_same_agents_asks_the_ranks_once() -> None:
    world = World()
    await world.connect()
    await world.connect()
    assert world.count("connect_peer") == 2


async def test_a_peer_with_new_agents_replaces_the_old_connection() -> None:
    world = World()
    await world.connect(agents="a")
    old = world.peers.find("d1")
    await world.connect(agents="b")
    assert world.peers.find("d1") is not old
    assert old.is_lost
    assert world.count("drop_peer") == 2


async def test_an_old_connection_with_running_exports_is_dropped_after_the_last_one() -> None:
    world = World()
    await world.connect(agents="a")
    old = world.peers.find("d1")
    world.peers.acquire(old)
    await world.connect(agents="b")
    assert world.count("drop_peer") == 0
    world.peers.release(old)
    assert world.count("drop_peer") == 2


async def test_the_error_of_a_rank_reaches_the_caller() -> None:
    world = World()
    task = asyncio.create_task(world.peers.connect(connect_request("d1")))
    await asyncio.sleep(0)
    peer_id = world.movers.commands[0][1].connect_peer.peer_id
    failed = plan_pb2.PeerConnected(peer_id=peer_id, error="agent name differs")
    world.peers.on_connected(1, failed)
    with pytest.raises(Unavailable, match="rank 1 could not connect to d1: agent name differs"):
        await task
    with pytest.raises(ReconnectRequired):
        world.peers.find("d1")


async def test_a_rank_that_never_answers_fails_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "CONNECT_TIMEOUT_S", 0.01)
    world = World()
    with pytest.raises(Unavailable, match=r"ranks \[0, 1\] could not connect"):
        await world.peers.connect(connect_request("d1"))
    with pytest.raises(ReconnectRequired):
        world.peers.find("d1")


async def test_the_first_differing_field_of_the_layout_is_named() -> None:
    world = World()
    request = connect_request("d1")
    request.layout = request.layout.replace(b'"layers":3', b'"layers":4')
    request.layout_fingerprint = hashlib.sha256(request.layout).hexdigest()
    with pytest.raises(LayoutMismatch, match="layers: 3 != 4"):
        await world.peers.connect(request)
    assert world.movers.commands == []


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda r: setattr(r, "proto_version", 2), LayoutMismatch, "proto_version: 1 != 2"),
        (lambda r: setattr(r, "nixl_version", "1.4"), LayoutMismatch, "nixl_version: '1.5.1'"),
        (lambda r: setattr(r, "instance_id", ""), RequestRejected, "instance_id is empty"),
        (lambda r: setattr(r, "layout_fingerprint", "00"), RequestRejected, "SHA-256"),
        (lambda r: r.ranks.pop(), RequestRejected, r"ranks \[0\]: expected 0\.\.1"),
        (
            lambda r: setattr(r.ranks[1], "agent_name", r.ranks[0].agent_name),
            RequestRejected,
            "unique",
        ),
        (lambda r: setattr(r.ranks[0], "agent_metadata", b""), RequestRejected, "0 bytes"),
        (
            lambda r: setattr(r.ranks[0], "agent_metadata", b"x" * (MAX_METADATA_BYTES + 1)),
            RequestRejected,
            "1048577 bytes",
        ),
    ],
)
async def test_a_wrong_introduction_is_refused_before_any_rank_hears_of_it(
    change, error: type[Exception], words: str
) -> None:
    world = World()
    request = connect_request("d1", cp=2)
    change(request)
    with pytest.raises(error, match=words):
        await world.peers.connect(request)
    assert world.movers.commands == []


async def test_a_sharding_the_planner_cannot_serve_is_refused() -> None:
    class Refusing(Pairing):
        def check(self, peer: prefill_pb2.Geometry) -> None:
            raise LayoutMismatch("tp=3 does not divide 4 heads")

    world = World(pairing=Refusing())
    with pytest.raises(LayoutMismatch, match="tp=3"):
        await world.connect()


async def test_the_oldest_idle_peer_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "MAX_PEERS", 2)
    world = World()
    for name in ("d1", "d2"):
        world.clock.now_s += 1.0
        await world.connect(name)
    world.peers.acquire(world.peers.find("d1"))
    await world.connect("d3")
    with pytest.raises(ReconnectRequired):
        world.peers.find("d2")
    world.peers.acquire(world.peers.find("d3"))
    with pytest.raises(QueueFull, match="2 decode instances"):
        await world.connect("d4")


async def test_agent_metadata_is_never_in_a_representation_of_a_peer() -> None:
    world = World()
    await world.connect()
    assert "secret" not in repr(world.peers.find("d1"))


@pytest.mark.dspark
@pytest.mark.parametrize(
    ("ours", "theirs", "sends"),
    [("f", "f", True), ("f", "g", False), ("", "g", False), ("f", "", False), ("", "", False)],
)
async def test_draft_rows_go_only_to_peers_with_the_same_drafter(
    ours: str, theirs: str, sends: bool
) -> None:
    """A mismatch never refuses a pair: the movers are just told of no ring."""
    world = World()
    world.peers.identity = replace(identity(), draft_fingerprint=ours)
    request = connect_request("d1")
    request.draft_fingerprint, request.geometry.draft_places = theirs, 6
    await connect(world.peers, world.movers, request)
    assert world.peers.find("d1").sends_draft is sends
    told = world.movers.commands[0][1].connect_peer.geometry
    assert told.draft_places == (6 if sends else 0)
