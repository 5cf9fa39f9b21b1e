# ruff: noqa: TID251  (this file is the exception to the ban on torch.cuda)
"""The one place that knows what kind of device computes: events, pinned staging, graphs, start-up.

`open_device("cpu" | "cuda:N")` gives a `CpuDevice` or a `CudaDevice` with the same methods. On CPU work is done when
the call returns, so events are always complete, staging is ordinary memory and a captured step is run again.
Nothing else in the project may name torch.cuda.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from k3.errors import ConfigError, K3Error


class Event(Protocol):
    """A point in the device's work."""

    def query(self) -> bool:
        """Whether everything before the point is done; never blocks."""
        ...

    def synchronize(self) -> None:
        """Block until it is."""
        ...


class Graph(Protocol):
    """A recorded sequence of device work over fixed buffers."""

    def replay(self) -> None:
        """Run it again with whatever the buffers hold now."""
        ...


class Device(Protocol):
    """What ranks do with a device besides computing on it."""

    torch_device: torch.device
    collective_backend: str  # "gloo" | "nccl"
    can_capture: bool
    recording: (
        threading.Lock
    )  # held while work is recorded: a call for the whole device from another thread ends that

    def record(self) -> Event:
        """An event after all work issued so far."""
        ...

    def synchronize(self) -> None:
        """Block until all work issued so far is done."""
        ...

    def staging(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the device copies from and to without an extra copy."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record `work`, which must only touch persistent buffers. Runs it at least once.

        Graphs of one device share the memory of what `work` holds in between, so they are replayed one after the other.
        Raises K3Error for work that cannot be recorded.
        """
        ...

    def free_bytes(self) -> int | None:
        """Free memory of the device; None where the host's memory is shared by everybody."""
        ...

    def room_bytes(self) -> int:
        """What this process could still take at most; less may be left when others take as well."""
        ...


def uploaded(values: Tensor, device: torch.device) -> Tensor:
    """A copy of host `values` on `device` that nothing waits for; on a CPU the tensor itself."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def uploaded_together(values: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """As `uploaded`, by one copy for all; wider types must come first."""
    widths = [value.dtype.itemsize for value in values]
    assert widths == sorted(widths, reverse=True), f"{widths} bytes: a value would be misplaced"
    sizes = [value.numel() * width for value, width in zip(values, widths, strict=True)]
    host = torch.cat([value.flatten().view(torch.uint8) for value in values])
    pieces = zip(uploaded(host, device).split(sizes), values, strict=True)
    return [piece.view(value.dtype).view(value.shape) for piece, value in pieces]


class _Done:
    """The event of a device whose work is done when the call returns."""

    def query(self) -> bool:
        """Always."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _Again:
    """The graph of a device that has none: the work itself."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        """Run the work."""
        self._work()


_DONE = _Done()


class CpuDevice:
    """Computation in this process's threads."""

    collective_backend = "gloo"
    can_capture = False

    def __init__(self, n_threads: int) -> None:
        """n_threads: of this process. Denormal states are flushed: they cost a hundredfold and mean zero."""
        self.torch_device = torch.device("cpu")
        self.recording = threading.Lock()
        torch.set_num_threads(n_threads)
        torch.set_flush_denormal(True)

    def record(self) -> Event:
        """Always complete."""
        return _DONE

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def staging(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Ordinary memory."""
        return torch.zeros(*shape, dtype=dtype)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Runs the work once; replay runs it again."""
        work()
        return _Again(work)

    def free_bytes(self) -> int | None:
        """Not ours to say."""
        return None

    def room_bytes(self) -> int:
        """What the host can give without taking from others, and its swap."""
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        kib = {name: int(value) for name, value, *_unit in lines}
        return (kib["MemAvailable:"] + kib["SwapFree:"]) << 10


class CudaDevice:
    """One GPU; all work of a rank goes to its current stream."""

    collective_backend = "nccl"
    can_capture = True
    WARM_UP_RUNS = (
        2  # libraries allocate workspaces in their first calls, which a capture must not see
    )

    def __init__(self, index: int) -> None:
        """Raises ConfigError when there is no such GPU."""
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise ConfigError(
                f"device cuda:{index} does not exist: torch sees "
                f"{torch.cuda.device_count()} GPUs; set the device to cpu or make the GPU visible"
            )
        self.torch_device = torch.device("cuda", index)
        self.recording = threading.Lock()
        torch.cuda.set_device(self.torch_device)
        self._side = torch.cuda.Stream(self.torch_device)  # warms up and records
        self._pool = torch.cuda.graph_pool_handle()

    def record(self) -> Event:
        """An event on the current stream."""
        event = torch.cuda.Event()
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize(self.torch_device)

    def staging(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Warm up on a side stream, then record there.

        Other threads go on using the GPU (NCCL's watchdog), so only this thread's calls are watched. What the mover's
        library does with the whole device while it connects would end a recording all the same: the mover waits.
        """
        current = torch.cuda.current_stream(self.torch_device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            for _ in range(self.WARM_UP_RUNS):
                work()
        graph = torch.cuda.CUDAGraph()
        try:
            recorded = torch.cuda.graph(
                graph, self._pool, self._side, capture_error_mode="thread_local"
            )
            with self.recording, recorded:
                work()
        except RuntimeError as error:
            raise K3Error(
                f"a step could not be recorded as a CUDA graph: {error}; set backends.graphs=off to run steps as they "
                "come, and report which backends were chosen"
            ) from error
        current.wait_stream(self._side)
        return graph

    def free_bytes(self) -> int:
        """Free memory of this GPU."""
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def room_bytes(self) -> int:
        """Its free memory, and what torch holds of it unused."""
        held = torch.cuda.memory_reserved(self.torch_device)
        return self.free_bytes() + held - torch.cuda.memory_allocated(self.torch_device)


def open_device(name: str, n_threads: int) -> Device:
    """The device called `cpu`, `cuda` (the first GPU) or `cuda:N`. Raises ConfigError otherwise.

    n_threads: CPU threads of this process's computation; unused on a GPU.
    """
    kind, _, index = name.partition(":")
    if kind == "cpu" and not index:
        return CpuDevice(n_threads)
    if kind == "cuda" and (index.isdigit() or not index):
        return CudaDevice(int(index or 0))
    raise ConfigError(f"device {name!r}: expected cpu, cuda or cuda:N")
