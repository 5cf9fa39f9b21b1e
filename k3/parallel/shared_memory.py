"""Collectives of CPU ranks on one machine, through a segment of shared memory instead of sockets.

A message of a decode step is a few kilobytes and there are dozens per step, so over sockets a step mostly waits to be
woken. Here a rank copies its part into its own slot, and reads the others' when they are there
(`kernels/k3_kernels/cpu/src/shared.cpp`). Sums are taken in rank order: all ranks have the same bits. A rank group is
always started by one front, so its ranks share a machine. Point-to-point messages stay with torch. One thread per rank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import torch
from k3_kernels.cpu import library
from torch import Tensor

from k3.errors import GroupFailed
from k3.parallel.collectives import Pending, TorchCollectives

SLOT_BYTES = 1 << 18  # of one rank; longer messages take several rounds
LINE, PAGE = 64, 4096
SPIN_S = 50e-6  # about what waking up costs; only where every rank can have a core


class SharedMemoryCollectives:
    """See `Collectives`. Made by `share` in every rank of a group."""

    def __init__(
        self, over: TorchCollectives, segment: mmap.mmap, deadline_s: float, n_neighbors: int
    ) -> None:
        self.rank, self.size = over.rank, over.size
        self._over = over
        self._segment = segment
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(segment))
        self._deadline_s = deadline_s
        self._spin_s = SPIN_S if n_neighbors <= len(os.sched_getaffinity(0)) else 0.0
        self._round = 1
        self._lost = ctypes.c_int64(-1)
        self._exchange = library.function("k3_shared_exchange")
        self._sums = {
            dtype: library.function(f"k3_shared_sum_{name}")
            for dtype, name in ((torch.float32, "f32"), (torch.float64, "f64"))
        }
        library.function("k3_shared_enter")(self._base, self.rank)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks in rank order, in place; a strided tensor goes through a contiguous copy."""
        add = self._sums.get(tensor.dtype)
        if add is None:
            return self._over.all_reduce(tensor)
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        add(
            *(self._base, self.rank, self.size, SLOT_BYTES, self._round),
            *(whole.data_ptr(), whole.numel(), self._spin_s, self._deadline_s),
            ctypes.addressof(self._lost),
        )
        self._done("all-reduce", -(-whole.nbytes // SLOT_BYTES))
        return whole

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenation along `dim`, in rank order."""
        piece = tensor.contiguous()
        pieces = piece.new_empty((self.size, *piece.shape))
        self._pieces("all-gather", piece, 1, 0, pieces)
        return torch.cat(pieces.unbind(), dim)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Exchange of equal pieces along dimension 0."""
        assert len(tensor) == self.size, f"{len(tensor)} pieces for {self.size} ranks"
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        self._pieces("all-to-all", sent, self.size, 0, received)
        return received

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite with the tensor of group rank `source`."""
        whole = tensor.contiguous()
        self._pieces("broadcast", whole, int(self.rank == source), source, whole.unsqueeze(0))
        return tensor if whole is tensor else tensor.copy_(whole)

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Start sending to group rank `to`, over torch."""
        return self._over.send(tensor, to)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Fill `tensor` from group rank `source`, over torch."""
        return self._over.recv(tensor, source)

    def barrier(self) -> None:
        """Wait for all ranks, up to the group's deadline."""
        nothing = torch.empty(0)
        self._pieces("barrier", nothing, 1, 0, nothing.unsqueeze(0))

    def _pieces(self, what: str, sent: Tensor, n_sent: int, first: int, received: Tensor) -> None:
        """sent: `n_sent` equal pieces; received: [n, ...], pieces of ranks first .. first + n - 1."""
        n_bytes = received.nbytes // len(received)
        self._exchange(
            *(self._base, self.rank, self.size, SLOT_BYTES, self._round),
            *(sent.data_ptr(), n_sent, n_bytes, first, len(received), received.data_ptr()),
            *(self._spin_s, self._deadline_s, ctypes.addressof(self._lost)),
        )
        self._done(what, max(1, -(-n_bytes // (SLOT_BYTES // self.size))))

    def _done(self, what: str, n_rounds: int) -> None:
        if (lost := self._lost.value) >= 0:
            raise GroupFailed(
                f"{what} failed: rank {self._over.ranks[lost]} did not come within {self._deadline_s:g} s, or its "
                "process is gone; the group must be restarted"
            )
        self._round += n_rounds


def share(
    over: TorchCollectives, *, deadline_s: float, n_neighbors: int
) -> SharedMemoryCollectives:
    """The same group through shared memory; every rank of it calls this. Raises GroupFailed.

    n_neighbors: ranks on this machine, of all groups. The segment never has a name: it ends with the last rank that
    maps it, however they end.
    """
    head = -(-LINE * (1 + over.size) // PAGE) * PAGE
    n_bytes = head + 2 * over.size * SLOT_BYTES
    own, where, refusal = -1, torch.zeros(2, dtype=torch.int64), ""
    try:
        if over.rank == 0:
            try:
                own = os.memfd_create("k3-collectives", os.MFD_CLOEXEC)
                os.posix_fallocate(own, 0, n_bytes)
                where = torch.tensor([os.getpid(), own])
            except OSError as error:
                refusal = f": {error}"
        over.broadcast(where)
        pid, number = where.tolist()
        if not pid:
            raise GroupFailed(
                f"no shared memory of {n_bytes} bytes{refusal}; give the ranks more memory, or set "
                "backends.collectives=torch"
            )
        segment = _mapped(Path(f"/proc/{pid}/fd/{number}"), n_bytes)
        over.barrier()
    finally:
        if own >= 0:
            os.close(own)
    return SharedMemoryCollectives(over, segment, deadline_s, n_neighbors)


def _mapped(path: Path, n_bytes: int) -> mmap.mmap:
    """The memory behind rank 0's descriptor. Raises GroupFailed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise GroupFailed(
            f"cannot map what rank 0 shares: {error}; let processes of one user see each other in /proc, or set "
            "backends.collectives=torch"
        ) from error
    try:
        return mmap.mmap(descriptor, n_bytes)
    finally:
        os.close(descriptor)
