"""The decode instances a sender knows: connected once, with every list prepared, dropped as a whole.

A lost peer is forgotten only when no handle towards it lives; a new `ConnectPeer` for its agents waits until then, and
a moment longer, because adding an agent right after removing it is known to race inside the library.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from k3.cache.layout import CacheLayout
from k3.errors import K3Error, LayoutMismatch
from k3.model.spec import K3Spec
from k3.transfer.agent import Lists, Region, TransferAgent, source_stripes, target_stripes
from k3.transfer.plan import Pair, Rows, Sharding
from k3.v1 import plan_pb2, prefill_pb2

log = logging.getLogger("k3.transfer")

RECONNECT_PAUSE_S = 0.1
MAX_PEERS = 256


@dataclass(frozen=True, slots=True)
class Link:
    """One pool of one receiver, ready to write to."""

    rows: Rows
    lists: Lists


@dataclass(slots=True)
class Peer:
    """One decode instance as this sender sees it. links: by receiver; n_live: posted handles that have not ended."""

    peer_id: str
    pair: Pair
    agents: dict[int, str]
    links: dict[int, tuple[Link, ...]]
    n_live: int = 0
    is_lost: bool = False


@dataclass(slots=True)
class Peers:
    """rank, spec, geometry and layout are this sender's own."""

    rank: int
    spec: K3Spec
    geometry: Sharding
    layout: CacheLayout
    known: dict[str, Peer] = field(default_factory=dict[str, Peer])
    _waiting: dict[str, plan_pb2.ConnectPeer] = field(
        default_factory=dict[str, plan_pb2.ConnectPeer]
    )
    _removed_at: float = -RECONNECT_PAUSE_S

    def ask(self, command: plan_pb2.ConnectPeer) -> Peer | None:
        """Queue a connection. Returns a peer that the new one replaces: its agents are outdated."""
        old = self.known.get(command.peer_id)
        self._waiting[command.peer_id] = command
        if old is None or old.is_lost or _same_agents(old, command):
            return None
        return old

    @property
    def is_waiting(self) -> bool:
        """Whether a connection is to be made."""
        return bool(self._waiting)

    def connect_waiting(self, agent: TransferAgent, now: float) -> list[plan_pb2.TransferStatus]:
        """Make the connections whose turn has come; one answer for each."""
        answers: list[plan_pb2.TransferStatus] = []
        for peer_id, command in list(self._waiting.items()):
            old = self.known.get(peer_id)
            if old is not None and old.is_lost:
                continue
            holder = self._holder(command) if old is None else None
            if holder is not None and holder.is_lost:
                continue
            error = ""
            if holder is not None:
                error = f"agents of {peer_id} belong to peer {holder.peer_id}, which is connected"
            elif old is None:
                if now < self._removed_at + RECONNECT_PAUSE_S:
                    continue
                try:
                    self.known[peer_id] = self._connect(agent, command)
                except (K3Error, ValueError) as failure:
                    error = str(failure)
            del self._waiting[peer_id]
            connected = plan_pb2.PeerConnected(peer_id=peer_id, error=error)
            answers.append(plan_pb2.TransferStatus(peer_connected=connected))
        return answers

    def take_back(self, peer_id: str) -> None:
        """The connection is not wanted any more: forget it if it was not made yet."""
        self._waiting.pop(peer_id, None)

    def sweep(self, agent: TransferAgent, now: float) -> None:
        """Forget lost peers that have no live handle."""
        for peer in [p for p in self.known.values() if p.is_lost and p.n_live == 0]:
            for name in peer.agents.values():
                agent.disconnect(name)
            del self.known[peer.peer_id]
            self._removed_at = now

    def clear(self) -> None:
        """The agent is gone, and with it everything about peers."""
        self.known.clear()

    def _holder(self, command: plan_pb2.ConnectPeer) -> Peer | None:
        """A peer that already has one of the announced agents; loading an agent twice would break the first."""
        names = {endpoint.agent_name for endpoint in command.ranks}
        return next((p for p in self.known.values() if names & set(p.agents.values())), None)

    def _connect(self, agent: TransferAgent, command: plan_pb2.ConnectPeer) -> Peer:
        if len(self.known) >= MAX_PEERS:
            raise LayoutMismatch(f"{len(self.known)} peers are connected, the limit is {MAX_PEERS}")
        pair = Pair.of(self.spec, self.geometry, command.geometry)
        endpoints = {endpoint.rank: endpoint for endpoint in command.ranks}
        if sorted(endpoints) != list(range(pair.decode.size)):
            raise LayoutMismatch(
                f"peer {command.peer_id} announced ranks {sorted(endpoints)}, its geometry has "
                f"{pair.decode.size}"
            )
        regions = {region.name: region for region in agent.regions}
        peer = Peer(command.peer_id, pair, {}, {})
        try:
            for receiver, endpoint in endpoints.items():
                rows = pair.rows(self.layout, self.rank, receiver)
                if not rows:
                    continue
                agent.connect(endpoint.agent_name, endpoint.agent_metadata)
                peer.agents[receiver] = endpoint.agent_name
                theirs = {pool.name: region_of(pool) for pool in endpoint.pools}
                peer.links[receiver] = tuple(
                    _link(agent, endpoint.agent_name, row, regions, theirs) for row in rows
                )
        except (K3Error, ValueError):
            for name in peer.agents.values():
                agent.disconnect(name)
            raise
        log.info("connected peer %s, receivers %s", command.peer_id, sorted(peer.links))
        return peer


def region_of(pool: prefill_pb2.Pool) -> Region:
    """A pool table entry as a value."""
    return Region(pool.name, pool.base, pool.device, pool.memory, pool.unit_bytes, pool.units)


def pool_of(region: Region) -> prefill_pb2.Pool:
    """The inverse of `region_of`."""
    return prefill_pb2.Pool(
        name=region.name,
        base=region.base,
        device=region.device,
        memory=region.memory,
        unit_bytes=region.unit_bytes,
        units=region.units,
    )


def _link(
    agent: TransferAgent,
    name: str,
    rows: Rows,
    ours: Mapping[str, Region],
    theirs: Mapping[str, Region],
) -> Link:
    if rows.pool not in theirs:
        raise LayoutMismatch(f"agent {name} announced no pool {rows.pool!r}: {sorted(theirs)}")
    source = source_stripes(ours[rows.pool], rows)
    target = target_stripes(theirs[rows.pool], rows)
    return Link(rows, agent.prepare(name, source, target))


def _same_agents(peer: Peer, command: plan_pb2.ConnectPeer) -> bool:
    announced = {endpoint.rank: endpoint.agent_name for endpoint in command.ranks}
    return all(announced.get(rank) == name for rank, name in peer.agents.items())
