"""Collectives of CPU ranks on one machine, through a segment of shared memory instead of sockets.

A message of a decode step is a few kilobytes and there are dozens per step, so over sockets a step mostly waits to be
woken. Here a rank copies its part into its own slot, and reads the others' when they are there
(`kernels/k3_kernels/cpu/src/shared.cpp`). Sums are taken in rank order: all ranks have the same bits. A rank group is
always started by one front, so its ranks share a machine. Point-to-point messages stay with torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import uuid
from pathlib import Path

import torch
from k3_kernels.cpu import library
from torch import Tensor

from k3.errors import GroupFailed
from k3.parallel.collectives import Pending, TorchCollectives

FOLDER = Path("/dev/shm")
SLOT_BYTES = 1 << 18  # of one rank; longer messages take several rounds
LINE, PAGE = 64, 4096
SPIN_S = 50e-6  # about what waking up costs; only where every rank can have a core


class SharedMemoryCollectives:
    """See `Collectives`. Made by `share` in every rank of a group."""

    def __init__(self, over: TorchCollectives, segment: mmap.mmap, deadline_s: float) -> None:
        self.rank, self.size = over.rank, over.size
        self._over = over
        self._segment = segment
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(segment))
        self._deadline_s = deadline_s
        self._spin_s = SPIN_S if self.size <= len(os.sched_getaffinity(0)) else 0.0
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


def share(over: TorchCollectives, deadline_s: float) -> SharedMemoryCollectives:
    """The same group through shared memory; every rank of it calls this. Raises GroupFailed.

    The segment has no name once all ranks have it: nothing is left behind, however they end.
    """
    head = -(-LINE * (1 + over.size) // PAGE) * PAGE
    n_bytes = head + 2 * over.size * SLOT_BYTES
    name = torch.zeros(32, dtype=torch.uint8)
    path, refusal = FOLDER / f"k3-{uuid.uuid4().hex[:24]}", ""
    if over.rank == 0:
        try:
            _create(path, n_bytes)
            name = torch.tensor(list(path.name.encode().ljust(32)), dtype=torch.uint8)
        except OSError as error:
            refusal = f": {error}"
    over.broadcast(name)
    if not name[0]:
        raise GroupFailed(
            f"no shared memory of {n_bytes} bytes in {FOLDER}{refusal}; make it larger, or set "
            "backends.collectives=torch"
        )
    path = FOLDER / bytes(name.tolist()).decode().strip()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            segment = mmap.mmap(descriptor, n_bytes)
        finally:
            os.close(descriptor)
        over.barrier()
    except OSError as error:
        raise GroupFailed(f"cannot map {path}: {error}; the group must be restarted") from error
    finally:
        if over.rank == 0:
            path.unlink(missing_ok=True)
    return SharedMemoryCollectives(over, segment, deadline_s)


def _create(path: Path, n_bytes: int) -> None:
    """A file of zeros only this user may open, all of it reserved."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, n_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
