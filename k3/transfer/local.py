"""`LocalAgent`: transfers inside one process, with delays, stalls, losses and deaths scripted by the test.

Agents meet in a `LocalFabric`. As with the real library, bytes land on their own when their fate says so, also those of
a handle that nobody looks at any more; the record leaves when its sender polls; only closing an agent, or the death of
one of the two, stops them. Addresses are real ones of this process; bounds are checked as strictly as the library does.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from k3.transfer.agent import Handle, Indices, Lists, PeerLost, Region, Stripes, WriteFailed


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one write.

    delay_s: until it lands. fails: it ends with WriteFailed, nothing lands. loses_record: bytes land, the record does
    not arrive. stalls: nothing happens until `LocalFabric.resume`.
    """

    delay_s: float = 0.0
    fails: bool = False
    loses_record: bool = False
    stalls: bool = False


class LocalFabric:
    """The agents that can reach each other. `fate(sender, receiver)` is asked once per posted write."""

    def __init__(
        self, clock: Callable[[], float], fate: Callable[[str, str], Fate] = lambda _s, _r: Fate()
    ) -> None:
        self.clock = clock
        self.fate = fate
        self.agents: dict[str, LocalAgent] = {}
        self.dead: set[str] = set()
        self.is_resumed = False

    def build(self, prefix: str) -> LocalAgent:
        """A new agent with a name of its own."""
        agent = LocalAgent(f"{prefix}-{uuid.uuid4().hex[:12]}", self)
        self.agents[agent.name] = agent
        return agent

    def is_alive(self, name: str) -> bool:
        """Whether an agent can be reached."""
        return name in self.agents and name not in self.dead

    def kill(self, name: str) -> None:
        """The process of `name` dies: whoever touches it gets PeerLost."""
        self.dead.add(name)

    def progress(self) -> None:
        """Land the bytes whose time has come."""
        for agent in self.agents.values():
            if agent.name not in self.dead:
                agent.progress()

    def resume(self) -> None:
        """Stalled writes go on."""
        self.is_resumed = True


@dataclass(slots=True)
class _Write:
    peer: str
    copies: list[tuple[int, int, int]]  # source address, target address, bytes
    record: bytes
    fate: Fate
    ready_at: float
    has_landed: bool = False


@dataclass(slots=True)
class _Prepared:
    peer: str
    source: Stripes
    target: Stripes


@dataclass(slots=True)
class LocalAgent:
    """See `TransferAgent`."""

    name: str
    fabric: LocalFabric
    inbox: list[bytes] = field(default_factory=list[bytes])
    _regions: list[Region] = field(default_factory=list[Region])
    _peers: set[str] = field(default_factory=set[str])
    _lists: dict[int, _Prepared] = field(default_factory=dict[int, _Prepared])
    _n_lists: int = 0
    _live: dict[int, _Write] = field(default_factory=dict[int, _Write])
    _n_writes: int = 0
    is_closed: bool = False

    @property
    def regions(self) -> tuple[Region, ...]:
        """Pools registered so far."""
        return tuple(self._regions)

    def register(self, regions: Sequence[Region]) -> None:
        """Make pools reachable."""
        self._regions.extend(regions)

    def metadata(self) -> bytes:
        """The name: everything else is in the fabric."""
        return self.name.encode()

    def connect(self, name: str, metadata: bytes) -> None:
        """Meet a living agent of the fabric."""
        if metadata.decode() != name:
            raise PeerLost(f"metadata of agent {metadata.decode()!r} announced as {name!r}")
        self._reach(name)
        self._peers.add(name)

    def prepare(self, peer: str, source: Stripes, target: Stripes) -> Lists:
        """Check bounds on both sides."""
        if peer not in self._peers:
            raise PeerLost(f"peer {peer!r} is not connected")
        for stripes, regions in ((source, self.regions), (target, self._reach(peer).regions)):
            for start in stripes.starts:
                end = start + (stripes.count - 1) * stripes.stride + stripes.length
                if not any(r.base <= start and end <= r.base + r.n_bytes for r in regions):
                    raise PeerLost(
                        f"stripes {start:#x}..{end:#x} lie outside every registered pool"
                    )
        self._n_lists += 1
        self._lists[self._n_lists] = _Prepared(peer, source, target)
        return Lists(self._n_lists)

    def write(self, lists: Lists, source: Indices, target: Indices, record: bytes) -> Handle:
        """Post; lands at a later poll."""
        if self.is_closed or lists not in self._lists:
            raise PeerLost(f"agent {self.name!r} has no lists {lists}")
        assert source.dtype == target.dtype == "int32"
        assert len(source) == len(target) > 0
        prepared = self._lists[lists]
        self._reach(prepared.peer)
        copies = [
            (
                _address(prepared.source, int(s)),
                _address(prepared.target, int(t)),
                prepared.source.length,
            )
            for s, t in zip(source, target, strict=True)
        ]
        fate = self.fabric.fate(self.name, prepared.peer)
        ready_at = self.fabric.clock() + fate.delay_s
        self._n_writes += 1
        self._live[self._n_writes] = _Write(prepared.peer, copies, record, fate, ready_at)
        return Handle(self._n_writes)

    def poll(self, handle: Handle) -> bool:
        """Whether the write has landed; then its record goes out."""
        write = self._live[handle]
        self.progress()
        if not write.has_landed and not self.fabric.is_alive(write.peer):
            del self._live[handle]
            raise PeerLost(f"peer {write.peer!r} is gone")
        if not self._is_due(write):
            return False
        del self._live[handle]
        if write.fate.fails:
            raise WriteFailed(f"write to {write.peer!r} failed as scripted")
        if not write.fate.loses_record:
            self._reach(write.peer).inbox.append(write.record)
        return True

    def progress(self) -> None:
        """What the library's own thread does."""
        for write in self._live.values():
            is_able = self._is_due(write) and not write.fate.fails
            if is_able and not write.has_landed and self.fabric.is_alive(write.peer):
                write.has_landed = True
                for source, target, n_bytes in write.copies:
                    ctypes.memmove(target, source, n_bytes)

    def _is_due(self, write: _Write) -> bool:
        is_held = write.fate.stalls and not self.fabric.is_resumed
        return not is_held and self.fabric.clock() >= write.ready_at

    def notify(self, peer: str, record: bytes) -> None:
        """Deliver at once."""
        self._reach(peer).inbox.append(record)

    def notes(self) -> list[bytes]:
        """Records that arrived."""
        found, self.inbox = self.inbox, []
        return found

    def disconnect(self, peer: str) -> None:
        """Forget a peer and its lists."""
        self._peers.discard(peer)
        self._lists = {k: v for k, v in self._lists.items() if v.peer != peer}

    def close(self) -> None:
        """Nothing lands from here or in here any more."""
        self.is_closed = True
        self._live.clear()
        self.fabric.agents.pop(self.name, None)

    def _reach(self, name: str) -> LocalAgent:
        if not self.fabric.is_alive(name):
            raise PeerLost(f"peer {name!r} is gone")
        return self.fabric.agents[name]


def _address(stripes: Stripes, index: int) -> int:
    row, unit = divmod(index, stripes.count)
    return stripes.starts[row] + unit * stripes.stride
