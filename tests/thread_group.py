"""A group of ranks as threads of one process: `Collectives` without sockets, for tests of sharded layers.

`run_group(n, body)` runs `body(rank)` on n threads and returns the results by rank; a failing rank
breaks the barrier, so the others fail too instead of waiting for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from k3.errors import GroupFailed
from k3.parallel.collectives import Collectives, Groups, Pending, SoloCollectives
from k3.parallel.mesh import Mesh

T = TypeVar("T")
DEADLINE_S = 60


class ThreadGroup:
    """Shared by the members of one group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = Barrier(size, timeout=DEADLINE_S)
        self.posted: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, by rank."""
        self.posted[rank] = tensor.clone()
        self.barrier.wait()
        everybody = list(self.posted)
        self.barrier.wait()
        return everybody


class ThreadCollectives:
    """One member."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self.group.exchange(self.rank, tensor)).sum(0))

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self.group.exchange(self.rank, tensor), dim)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return torch.stack([t[self.rank] for t in self.group.exchange(self.rank, tensor)])

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor.copy_(self.group.exchange(self.rank, tensor)[source])

    def send(self, tensor: Tensor, to: int) -> Pending:
        raise GroupFailed("threads hand frames over themselves")

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        raise GroupFailed("threads hand frames over themselves")

    def barrier(self) -> None:
        self.group.exchange(self.rank, torch.empty(0))


class Sent:
    def wait(self) -> None: ...


class ThreadPipeline(SoloCollectives):
    """One member of a pipeline: messages between two ranks arrive in order."""

    def __init__(self, lines: dict[tuple[int, int], Queue[Tensor]], rank: int) -> None:
        self.lines, self.rank = lines, rank

    def send(self, tensor: Tensor, to: int) -> Pending:
        self.lines[self.rank, to].put(tensor.clone())
        return Sent()

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        message = self.lines[source, self.rank].get(timeout=DEADLINE_S)
        tensor[: len(message)].copy_(message)  # as gloo: a shorter message fills the front
        return tensor


def mesh_groups(mesh: Mesh) -> list[Groups]:
    """The groups of every rank of a mesh."""

    def members(groups: tuple[tuple[int, ...], ...]) -> dict[int, Collectives]:
        joined: dict[int, Collectives] = {}
        for ranks in groups:
            group = ThreadGroup(len(ranks))
            for i, rank in enumerate(ranks):
                joined[rank] = ThreadCollectives(group, i) if len(ranks) > 1 else SoloCollectives()
        return joined

    shard, context = members(mesh.stage_groups()), members(mesh.context_groups())
    lines = {(a, b): Queue[Tensor]() for a in range(mesh.size) for b in range(mesh.size)}
    return [Groups(shard[r], context[r], ThreadPipeline(lines, r)) for r in range(mesh.size)]


def run_group(n: int, body: Callable[[int], T]) -> list[T]:
    """Run `body` for every rank at once."""
    with ThreadPoolExecutor(n) as pool:
        return [future.result(DEADLINE_S) for future in [pool.submit(body, r) for r in range(n)]]
