"""`TransferAgent`: what moves bytes between processes, and the values it takes.

An agent writes, never reads: `write` puts pieces of our registered pools into a peer's pools and then delivers one
32-byte record there. A write cannot be cancelled; it ends when `poll` says so or raises, or when the agent is closed.
One thread owns an agent. Implementations: `NixlAgent` (nixl.py), `LocalAgent` (local.py, one process, for tests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

from k3.errors import TransferError
from k3.transfer.plan import Rows

# The NIXL library's switch for batches, in the environment: read when an agent is built.
BATCHES = "NIXL_UCX_SGL_ENABLE"

Indices = npt.NDArray[np.int32]
Lists = NewType("Lists", int)
Handle = NewType("Handle", int)


class PeerLost(TransferError):
    """The peer's agent is gone; every later call on it would fail too."""

    code = "peer_lost"


class BatchesRefused(PeerLost):
    """The first write to a peer raised while it was posted, in a batch; an agent without batches may reach it."""

    code = "batches_refused"


class WriteFailed(TransferError):
    """One write failed, the peer may still live; it may be posted again."""

    code = "write_failed"


@dataclass(frozen=True, slots=True)
class Region:
    """One registered pool in addresses of its own process: `units` pieces of `unit_bytes` from `base` on.

    memory: "DRAM" or "VRAM"; device: ordinal for VRAM, 0 for DRAM.
    """

    name: str
    base: int
    device: int
    memory: str
    unit_bytes: int
    units: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.unit_bytes * self.units


@dataclass(frozen=True, slots=True)
class Stripes:
    """Equal pieces of one pool: index `r * count + u` is `length` bytes at `starts[r] + u * stride`."""

    memory: str
    device: int
    starts: tuple[int, ...]
    length: int
    stride: int
    count: int


def source_stripes(region: Region, rows: Rows) -> Stripes:
    """The sender's pieces. Raises ValueError when the pool is not the one the rows were computed for."""
    _check(region, rows.source_stride, rows.source_units)
    starts = tuple(region.base + offset for offset in rows.source_offsets)
    return Stripes(
        region.memory,
        region.device,
        starts,
        rows.length,
        rows.source_stride,
        rows.source_units,
    )


def target_stripes(region: Region, rows: Rows) -> Stripes:
    """The receiver's pieces. Raises ValueError when the announced pool is not the expected one."""
    _check(region, rows.target_stride, rows.target_units)
    starts = tuple(region.base + offset for offset in rows.target_offsets)
    return Stripes(
        region.memory,
        region.device,
        starts,
        rows.length,
        rows.target_stride,
        rows.target_units,
    )


def _check(region: Region, stride: int, units: int) -> None:
    if (region.unit_bytes, region.units) != (stride, units):
        raise ValueError(
            f"pool {region.name!r} has {region.units} units of {region.unit_bytes} bytes, expected {units} of "
            f"{stride}: geometry and pool table disagree"
        )


class TransferAgent(Protocol):
    """Calls raise PeerLost or WriteFailed where a peer is concerned, TransferError otherwise."""

    @property
    def name(self) -> str:
        """Unique per agent ever built."""
        ...

    @property
    def regions(self) -> tuple[Region, ...]:
        """Pools registered so far."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Make pools reachable, once each, for the agent's whole life; the caller keeps the memory alive."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to write here. Secret: it gives write access to the process."""
        ...

    def connect(self, name: str, metadata: bytes) -> None:
        """Load a peer and wire it up; its metadata must carry `name`."""
        ...

    def prepare(self, peer: str, source: Stripes, target: Stripes) -> Lists:
        """Descriptors of a pool pair, prepared once; they live until `disconnect(peer)`."""
        ...

    def write(self, lists: Lists, source: Indices, target: Indices, record: bytes) -> Handle:
        """Post writes of source pieces to target pieces (equal, non-zero counts), then `record`. May block to copy."""
        ...

    def poll(self, handle: Handle) -> bool:
        """Whether the write has ended well; its record is on the way then. The handle is released with True or a raise.

        Must be called until it does: polling is what sends the record.
        """
        ...

    def notify(self, peer: str, record: bytes) -> None:
        """Deliver a record without data."""
        ...

    def notes(self) -> list[bytes]:
        """Records that arrived since the last call."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer and its lists; no handle towards it may be live. Unknown names are fine."""
        ...

    def close(self) -> None:
        """Destroy the agent: no write of it, or into it, lands after this returns. Idempotent."""
        ...
