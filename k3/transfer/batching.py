"""`BatchingAgent`: writes with all pieces of a handle in one call of the GPU's driver, where the peer allows it.

Between GPUs that reach each other by CUDA IPC, batches make pieces in random order as fast as runs. Other paths (TCP)
know no batches of GPU memory: there the first write to a peer raises, and from then on that peer is served by a second
agent, without batches, that is built when it is first needed. The write itself has failed: whoever posted it posts it
again, with the pause that a raised write is owed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from k3.errors import TransferError
from k3.transfer.agent import (
    BatchesRefused,
    Handle,
    Indices,
    Lists,
    PeerLost,
    Region,
    Stripes,
    TransferAgent,
    WriteFailed,
)

log = logging.getLogger("k3.transfer")


@dataclass(slots=True)
class _Peer:
    metadata: bytes
    agent: TransferAgent


@dataclass(slots=True)
class _Prepared:
    """Lists of a pool pair. inner: what `agent` calls them."""

    peer: str
    source: Stripes
    target: Stripes
    agent: TransferAgent
    inner: Lists


class BatchingAgent:
    """Implements `TransferAgent` over two of them. What arrives here, arrives at the first."""

    def __init__(self, first: TransferAgent, build_second: Callable[[], TransferAgent]) -> None:
        """first: with batches; build_second: without, nothing registered."""
        self._first = first
        self._build_second = build_second
        self._second: TransferAgent | None = None
        self._peers: dict[str, _Peer] = {}
        self._prepared: dict[int, _Prepared] = {}
        self._live: dict[int, tuple[TransferAgent, Handle]] = {}
        self._n_prepared = self._n_handles = 0

    @property
    def name(self) -> str:
        """The first agent's: what peers write to."""
        return self._first.name

    @property
    def regions(self) -> tuple[Region, ...]:
        """Pools registered so far."""
        return self._first.regions

    def register(self, regions: Sequence[Region]) -> None:
        """Make pools reachable; the second agent registers them when it is built."""
        self._first.register(regions)

    def metadata(self) -> bytes:
        """Of the first agent."""
        return self._first.metadata()

    def connect(self, name: str, metadata: bytes) -> None:
        """Load a peer into the first agent; it takes batches until it refuses them."""
        self._first.connect(name, metadata)
        self._peers[name] = _Peer(metadata, self._first)

    def prepare(self, peer: str, source: Stripes, target: Stripes) -> Lists:
        """Lists at the agent that serves the peer."""
        known = self._peers.get(peer)
        agent = self._first if known is None else known.agent
        inner = agent.prepare(peer, source, target)
        self._n_prepared += 1
        self._prepared[self._n_prepared] = _Prepared(peer, source, target, agent, inner)
        return Lists(self._n_prepared)

    def write(self, lists: Lists, source: Indices, target: Indices, record: bytes) -> Handle:
        """In a batch; by the second agent once the peer has refused one. Raises WriteFailed for the one it refuses."""
        prepared = self._prepared[lists]
        try:
            inner = prepared.agent.write(prepared.inner, source, target, record)
        except BatchesRefused as refusal:
            self._serve_alone(prepared.peer, refusal)
            raise WriteFailed(f"refused in a batch: {refusal}") from refusal
        self._n_handles += 1
        self._live[self._n_handles] = (prepared.agent, inner)
        return Handle(self._n_handles)

    def poll(self, handle: Handle) -> bool:
        """At the agent that posted it."""
        agent, inner = self._live[handle]
        has_ended = True
        try:
            has_ended = agent.poll(inner)
        finally:
            if has_ended:
                del self._live[handle]
        return has_ended

    def notify(self, peer: str, record: bytes) -> None:
        """By the agent that serves the peer."""
        known = self._peers.get(peer)
        (self._first if known is None else known.agent).notify(peer, record)

    def notes(self) -> list[bytes]:
        """Records that arrived."""
        return self._first.notes()

    def disconnect(self, peer: str) -> None:
        """Forget a peer and its lists everywhere."""
        self._peers.pop(peer, None)
        self._prepared = {k: v for k, v in self._prepared.items() if v.peer != peer}
        self._first.disconnect(peer)
        if self._second is not None:
            self._second.disconnect(peer)

    def close(self) -> None:
        """Destroy both."""
        self._first.close()
        if self._second is not None:
            self._second.close()

    def _serve_alone(self, peer: str, refusal: BatchesRefused) -> None:
        """Move a peer and its lists to the second agent. Raises PeerLost when that does not reach it either."""
        log.warning(
            "agent %s takes no batches of pieces (%s): each piece is posted alone", peer, refusal
        )
        try:
            second = self._second or self._registered()
            second.connect(peer, self._peers[peer].metadata)
            moved = {
                key: second.prepare(peer, prepared.source, prepared.target)
                for key, prepared in self._prepared.items()
                if prepared.peer == peer
            }
        except PeerLost:
            raise
        except TransferError as error:
            raise PeerLost(f"no agent without batches for {peer}: {error}") from error
        self._peers[peer].agent = second
        for key, inner in moved.items():
            self._prepared[key].agent, self._prepared[key].inner = second, inner

    def _registered(self) -> TransferAgent:
        """The second agent, with all pools; kept once it is whole."""
        second = self._build_second()
        try:
            second.register(self.regions)
        except TransferError:
            second.close()
            raise
        self._second = second
        return second
