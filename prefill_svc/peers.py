"""The decode instances this instance can write to: compatibility checks, connections of all ranks, a bounded map.

`Connect` introduces a peer. Its layout is compared field by field, its sharding by the planner's own rules, its pool
table by arithmetic; then every rank's mover loads the peer's agents, and only when all have answered is the peer
usable. A peer that comes back with new agents is a new connection: movers know connections, not instances, so the old
one can drain while the new one is made. Agent metadata is opaque and secret: passed through, never logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from k3.cache.layout import PROTO_VERSION, first_difference
from k3.errors import (
    K3Error,
    LayoutMismatch,
    QueueFull,
    ReconnectRequired,
    RequestRejected,
    Unavailable,
)
from k3.v1 import plan_pb2, prefill_pb2

log = logging.getLogger("k3.prefill")

MAX_PEERS = 64
MAX_METADATA_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 15.0

SendCommand = Callable[[int, plan_pb2.TransferCommand], None]


class Pairing(Protocol):
    """What the transfer planner says about this instance and a peer."""

    def check(self, peer: prefill_pb2.Geometry) -> None:
        """Raises LayoutMismatch when no plan exists between the two shardings."""
        ...

    def n_senders(self, peer: prefill_pb2.Geometry, prompt_len: int) -> list[int]:
        """Writers each decode rank has to expect for a prompt, by flat decode rank."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """What this instance says of itself. `layout` is the canonical JSON that `layout_fingerprint` hashes."""

    instance_id: str
    layout: bytes
    layout_fingerprint: str
    draft_fingerprint: str
    nixl_version: str
    geometry: prefill_pb2.Geometry


@dataclass(eq=False, slots=True)
class Peer:
    """One connection to one decode instance. `peer_id` is what movers call it."""

    peer_id: str
    instance_id: str
    geometry: prefill_pb2.Geometry
    agents: tuple[str, ...]
    waiting: set[int]
    connected: asyncio.Future[None]
    last_used_s: float
    n_exports: int = 0
    is_lost: bool = False
    sends_draft: bool = False

    @property
    def n_ranks(self) -> int:
        """Ranks of the peer."""
        return len(self.agents)


@dataclass(slots=True)
class Peers:
    """Peers by instance id; `dropped` ones stay until their last export has ended."""

    identity: Identity
    pairing: Pairing
    n_ranks: int
    command: SendCommand
    clock: Callable[[], float]
    _by_instance: dict[str, Peer] = field(default_factory=dict[str, Peer])
    _by_id: dict[str, Peer] = field(default_factory=dict[str, Peer])
    _n_made: int = 0

    async def connect(self, request: prefill_pb2.ConnectRequest) -> prefill_pb2.ConnectResponse:
        """Make a peer usable, or confirm that it is. Idempotent.

        Raises LayoutMismatch naming the first differing field, RequestRejected for a malformed request, Unavailable
        when a rank cannot reach the peer.
        """
        self._check(request)
        agents = tuple(rank.agent_name for rank in request.ranks)
        peer = self._by_instance.get(request.instance_id)
        if peer is None or peer.agents != agents:
            if peer is not None:
                self.lose(peer, "it came back with new agents")
            peer = self._introduce(request, agents)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.shield(peer.connected)
        except TimeoutError as error:
            missing = sorted(peer.waiting)
            self.lose(peer, f"ranks {missing} did not connect")
            raise Unavailable(
                f"ranks {missing} could not connect to {request.instance_id} within "
                f"{CONNECT_TIMEOUT_S:g} s; check the data plane between the two",
                code="peer_unreachable",
            ) from error
        return prefill_pb2.ConnectResponse(
            instance_id=self.identity.instance_id,
            layout_fingerprint=self.identity.layout_fingerprint,
            draft_fingerprint=self.identity.draft_fingerprint,
            geometry=self.identity.geometry,
        )

    def find(self, instance_id: str) -> Peer:
        """The usable peer of an instance. Raises ReconnectRequired."""
        peer = self._by_instance.get(instance_id)
        if peer is None or not peer.connected.done():
            raise ReconnectRequired(
                f"decode instance {instance_id!r} is not connected to {self.identity.instance_id!r}; "
                "call Connect and try again"
            )
        return peer

    def acquire(self, peer: Peer) -> None:
        """One more export runs to the peer."""
        peer.n_exports += 1
        peer.last_used_s = self.clock()

    def release(self, peer: Peer) -> None:
        """One export less; the last one of a lost peer lets the movers forget it."""
        peer.n_exports -= 1
        peer.last_used_s = self.clock()
        if peer.is_lost and peer.n_exports == 0:
            self._forget(peer)

    def lose(self, peer: Peer, why: str) -> None:
        """Take a peer out of use: it must call Connect again. Idempotent."""
        if peer.is_lost:
            return
        peer.is_lost = True
        log.warning("peer dropped", extra={"peer": peer.instance_id, "reason": why})
        if self._by_instance.get(peer.instance_id) is peer:
            del self._by_instance[peer.instance_id]
        if not peer.connected.done():
            _fail(peer, Unavailable(f"peer {peer.instance_id} was dropped: {why}"))
        if peer.n_exports == 0:
            self._forget(peer)

    def on_connected(self, rank: int, status: plan_pb2.PeerConnected) -> None:
        """A rank answered ConnectPeer."""
        peer = self._by_id.get(status.peer_id)
        if peer is None or peer.connected.done():
            return
        if status.error:
            error = Unavailable(
                f"rank {rank} could not connect to {peer.instance_id}: {status.error}",
                code="peer_unreachable",
            )
            _fail(peer, error)
            self.lose(peer, status.error)
            return
        peer.waiting.discard(rank)
        if not peer.waiting:
            peer.connected.set_result(None)
            log.info("peer connected", extra={"peer": peer.instance_id, "ranks": peer.n_ranks})

    def all(self) -> tuple[Peer, ...]:
        """Every peer that is usable or being introduced."""
        return tuple(self._by_instance.values())

    def _introduce(self, request: prefill_pb2.ConnectRequest, agents: tuple[str, ...]) -> Peer:
        if len(self._by_instance) >= MAX_PEERS:
            self._make_room()
        self._n_made += 1
        peer = Peer(
            peer_id=f"{request.instance_id}#{self._n_made}",
            instance_id=request.instance_id,
            geometry=request.geometry,
            agents=agents,
            waiting=set(range(self.n_ranks)),
            connected=asyncio.get_running_loop().create_future(),
            last_used_s=self.clock(),
            sends_draft=request.draft_fingerprint == self.identity.draft_fingerprint != "",
        )
        geometry = prefill_pb2.Geometry()
        geometry.CopyFrom(request.geometry)
        if not peer.sends_draft:
            geometry.draft_places = 0  # its ring is for rows of another drafter
        if request.draft_fingerprint not in ("", self.identity.draft_fingerprint):
            log.warning(
                "draft rows are not sent: the drafters differ, requests start cold",
                extra={"peer": request.instance_id},
            )
        self._by_instance[request.instance_id] = peer
        self._by_id[peer.peer_id] = peer
        connect = plan_pb2.ConnectPeer(peer_id=peer.peer_id, geometry=geometry, ranks=request.ranks)
        for rank in range(self.n_ranks):
            self.command(rank, plan_pb2.TransferCommand(connect_peer=connect))
        return peer

    def _make_room(self) -> None:
        idle = [p for p in self._by_instance.values() if p.n_exports == 0 and p.connected.done()]
        if not idle:
            raise QueueFull(f"{MAX_PEERS} decode instances are connected and busy; try later")
        self.lose(min(idle, key=lambda p: p.last_used_s), "room for another peer was needed")

    def _forget(self, peer: Peer) -> None:
        if self._by_id.pop(peer.peer_id, None) is None:
            return
        drop = plan_pb2.TransferCommand(drop_peer=plan_pb2.DropPeer(peer_id=peer.peer_id))
        for rank in range(self.n_ranks):
            self.command(rank, drop)

    def _check(self, request: prefill_pb2.ConnectRequest) -> None:
        """Versions, layout, sharding, pool table; in this order, the first difference is named."""
        ours = self.identity
        if request.proto_version != PROTO_VERSION:
            raise LayoutMismatch(
                f"proto_version: {PROTO_VERSION} != {request.proto_version}; run the same release on both"
            )
        if not request.instance_id:
            raise RequestRejected(
                "instance_id is empty; send the caller's identity", param="instance_id"
            )
        if request.nixl_version != ours.nixl_version:
            raise LayoutMismatch(
                f"nixl_version: {ours.nixl_version!r} != {request.nixl_version!r}; install the same on both"
            )
        if hashlib.sha256(request.layout).hexdigest() != request.layout_fingerprint:
            raise RequestRejected(
                "layout_fingerprint is not the SHA-256 of layout", param="layout_fingerprint"
            )
        if request.layout_fingerprint != ours.layout_fingerprint:
            difference = _difference(ours.layout, request.layout)
            raise LayoutMismatch(f"{difference} (prefill != decode); the pair cannot transfer")
        self.pairing.check(request.geometry)
        _check_ranks(request)


def _difference(ours: bytes, theirs: bytes) -> str:
    try:
        difference = first_difference(ours, theirs)
    except ValueError as error:
        raise RequestRejected(f"layout is not a JSON object: {error}", param="layout") from error
    return difference or "layout: same fields, other bytes (not canonical JSON)"


def _check_ranks(request: prefill_pb2.ConnectRequest) -> None:
    geometry = request.geometry
    expected = geometry.pp * geometry.tp * geometry.cp
    if [rank.rank for rank in request.ranks] != list(range(expected)):
        raise RequestRejected(
            f"ranks {[rank.rank for rank in request.ranks]}: expected 0..{expected - 1} in flat order "
            f"for pp={geometry.pp} tp={geometry.tp} cp={geometry.cp}",
            param="ranks",
        )
    names = {rank.agent_name for rank in request.ranks}
    if len(names) != expected or "" in names:
        raise RequestRejected("agent names must be unique and not empty", param="ranks")
    for rank in request.ranks:
        if not 0 < len(rank.agent_metadata) <= MAX_METADATA_BYTES:
            raise RequestRejected(
                f"agent metadata of rank {rank.rank} has {len(rank.agent_metadata)} bytes; expected 1.."
                f"{MAX_METADATA_BYTES}",
                param="ranks",
            )


def _fail(peer: Peer, error: K3Error) -> None:
    peer.connected.set_exception(error)
    peer.connected.exception()  # mark as seen: nobody may be waiting
