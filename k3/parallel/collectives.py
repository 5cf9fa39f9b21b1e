"""Collective operations of one group of ranks: `Collectives`, alone (`SoloCollectives`) or over torch.

CPU ranks may exchange through shared memory instead (`k3/parallel/shared_memory.py`).

Layers receive the group they need by constructor and never ask for sizes of the world. Every wait has
the group's deadline; a peer that is late or gone raises `GroupFailed`, after which the group is lost.
Ranks in calls are positions inside the group, except `send`/`recv`, which use them too.
`Groups` bundles the three groups a rank belongs to: its stage, its context-parallel group, its pipeline.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from k3.errors import GroupFailed
from k3.parallel.mesh import Place


class Pending(Protocol):
    """A send in progress; owns the tensor until `wait` returns."""

    def wait(self) -> None:
        """Block until the tensor may be reused. Raises GroupFailed."""
        ...


class Collectives(Protocol):
    """Operations over one group; all ranks of it call the same ones in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; returns `tensor`."""
        ...

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenation of all ranks' tensors along `dim`, in rank order."""
        ...

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """tensor: [size, ...], piece j goes to rank j. Returns [size, ...], piece j came from rank j."""
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite `tensor` with that of rank `source`; returns it."""
        ...

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Start sending; `tensor` must not change before `wait`."""
        ...

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Fill `tensor` from rank `source`; returns it."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...


class SoloCollectives:
    """A group of one: every operation is the identity; there is nobody to send to."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensor itself."""
        return tensor

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor itself."""
        return tensor

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Refused: a group of one has no peer."""
        raise GroupFailed(f"send to rank {to} in a group of one rank")

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Refused: a group of one has no peer."""
        raise GroupFailed(f"receive from rank {source} in a group of one rank")

    def barrier(self) -> None:
        """Returns at once."""


@dataclass(frozen=True, slots=True)
class _Sending:
    """Keeps the tensor alive until the transport has read it."""

    tensor: Tensor
    work: dist.Work
    what: str

    def wait(self) -> None:
        _checked(self.what, self.work.wait)


def _checked(what: str, call: Callable[[], object]) -> None:
    """Run a torch.distributed call; its one exception type becomes ours."""
    try:
        call()
    except RuntimeError as error:
        raise GroupFailed(f"{what} failed: {error}; the group must be restarted") from error


class TorchCollectives:
    """One torch process group (gloo on CPU, NCCL on GPU)."""

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        """group: already created by all of `ranks` (flat ranks of the world, in group order)."""
        self.group = group
        self.ranks = ranks
        self.rank = dist.get_rank(group)
        self.size = len(ranks)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; a strided tensor goes through a contiguous copy."""
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        _checked("all-reduce", lambda: dist.all_reduce(whole, group=self.group))
        return whole

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenation along `dim`, in rank order."""
        piece = tensor.contiguous()
        pieces = [torch.empty_like(piece) for _ in self.ranks]
        _checked("all-gather", lambda: dist.all_gather(pieces, piece, group=self.group))
        return torch.cat(pieces, dim)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Exchange of equal pieces along dimension 0."""
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        _checked("all-to-all", lambda: dist.all_to_all_single(received, sent, group=self.group))
        return received

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite with the tensor of group rank `source`."""
        _checked(
            "broadcast", lambda: dist.broadcast(tensor, src=self.ranks[source], group=self.group)
        )
        return tensor

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Start sending to group rank `to`."""
        what = f"send to rank {self.ranks[to]}"
        works: list[dist.Work | None] = []
        _checked(
            what, lambda: works.append(dist.isend(tensor, dst=self.ranks[to], group=self.group))
        )
        (work,) = works
        if work is None:
            raise GroupFailed(f"{what} failed: this process is not a member of the group")
        return _Sending(tensor, work, what)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Fill `tensor` from group rank `source`; waits up to the group's deadline."""
        _checked(
            f"receive from rank {self.ranks[source]}",
            lambda: dist.recv(tensor, src=self.ranks[source], group=self.group),
        )
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks, up to the group's deadline."""
        _checked("barrier", lambda: dist.barrier(group=self.group))


def as_is(group: TorchCollectives) -> Collectives:
    """A group without a wrapper."""
    return group


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups one rank belongs to.

    shard: the ranks of its stage, in shard order: all-reduces, head and vocabulary splits.
    context: the ranks that share its tp slice of MLA heads: the helix exchange.
    pipeline: all ranks of the mesh, by flat rank: frames between stages.
    """

    shard: Collectives
    context: Collectives
    pipeline: Collectives


def solo_groups() -> Groups:
    """Groups of a mesh of one rank."""
    alone = SoloCollectives()
    return Groups(alone, alone, alone)


def join(
    place: Place,
    host: str,
    port: int,
    backend: str,
    deadline_s: float,
    *,
    wrap: Callable[[TorchCollectives], Collectives] = as_is,
    listener: int | None = None,
) -> Groups:
    """Join the group of `place.mesh` through rank 0's store at `host:port`, and build its sub-groups.

    Every rank calls it once; returns when all have joined. A mesh of one rank opens no socket.
    backend: "gloo" or "nccl". wrap: called in every rank of a stage's or context group, for what the layers get.
    listener: in rank 0, the descriptor of a socket that listens at `host:port` already.
    Raises GroupFailed when a rank does not come within `deadline_s`.
    """
    mesh = place.mesh
    if mesh.size == 1:
        return solo_groups()
    timeout = timedelta(seconds=deadline_s)
    bracketed = f"[{host}]" if _is_ipv6(host) else host

    def meet() -> None:
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host,
            port,
            mesh.size,
            is_master=place.rank == 0,
            timeout=timeout,
            master_listen_fd=listener if place.rank == 0 else None,
        )
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=mesh.size, timeout=timeout
        )

    _checked(f"joining {mesh} as rank {place.rank} at {bracketed}:{port}", meet)

    def mine(
        groups: tuple[tuple[int, ...], ...], wrap: Callable[[TorchCollectives], Collectives]
    ) -> Collectives:
        """All ranks create all groups, in the same order; each keeps its own."""
        kept: Collectives = SoloCollectives()
        for ranks in groups:
            if len(ranks) == 1:
                continue
            group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
            if place.rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                kept = wrap(TorchCollectives(group, ranks))
        return kept

    world = tuple(range(mesh.size))
    shard, context = mine(mesh.stage_groups(), wrap), mine(mesh.context_groups(), wrap)
    return Groups(shard, context, mine((world,), as_is))


def leave() -> None:
    """Destroy the process groups, if any; the last thing a rank does."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
