# ruff: noqa: TID251  (pools of one layout give their memory back before the next)
"""Ranks that time steps of the stand-in: one process each, all layouts of a group one after the other.

`run` starts the processes and yields what their first ranks say. Each layout of a group is `tp` (latent caches whole on
every rank, heads shared out) or `cp` (pages dealt to ranks, all heads everywhere). A step is timed as a rank runs it,
recorded where the device can: replays back to back, the loop with two steps in flight, kernels by the profiler.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from validate_model import Caches, Shape, StandIn, runner_of, sharded, stand_in, step_of

from decode_svc.rank.cuda_graphs import GREEDY, CudaGraphs
from decode_svc.rank.graphs import StepKey, generous
from decode_svc.rank.step import VerifyStep
from k3.device import Device, open_device
from k3.errors import K3Error
from k3.parallel.collectives import Groups, Pending, SoloCollectives, join
from k3.parallel.mesh import Mesh, Place
from k3.ports import free_ports

JOIN_S = 120.0
TOKENS = (1, 8, 32, 256)  # of the messages that are timed
IN_A_ROW = 20

# First words of kernels' names, and words inside those of libraries. What is not listed is `other`; names of matrix
# products hold one of PRODUCTS.
CLASSES = {
    "reduce": ("ncclDevKernel_AllReduce",),
    "exchange": ("ncclDevKernel_SendRecv",),
    "gather": ("ncclDevKernel",),  # logits and tokens
    "attention": ("attend", "merge_parts", "_merge", "_project", "_write", "correct", "reach"),
    "kda": ("_decode", "prepare_each", "prepare_tile", "_apply"),
    "experts": ("_inner", "_outer", "_logits", "_choose", "_group", "_sum"),
}
LIBRARIES = {"flash_fwd": "attention", "get_mla_metadata": "attention"}
PRODUCTS = ("nvjet", "gemm", "gemv", "cutlass", "splitK", "cublas")


@dataclass(frozen=True, slots=True)
class Point:
    """One shape in one layout. Microseconds; kernels: by class, of one step of the first rank.

    alone: one rank of `ranks` whose messages were not sent, for groups larger than the machine.
    """

    layout: str
    ranks: int
    rows: int
    length: int
    group: int
    step_us: float
    loop_us: float
    kernels: dict[str, float] = field(default_factory=dict[str, float])
    alone: bool = False

    @property
    def shape(self) -> Shape:
        """What it worked on."""
        return Shape(self.rows, self.length, self.group)

    @property
    def idle(self) -> float:
        """Share of the loop's time in which the GPU has no step."""
        return max(0.0, 1 - self.step_us / self.loop_us)


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of `tokens` tokens inside a recorded run. Bytes sent by a rank; microseconds."""

    what: str
    ranks: int
    tokens: int
    n_bytes: int
    time_us: float


class Note(NamedTuple):
    """A line for people."""

    text: str


Said = Point | Message | Note


class Seat(NamedTuple):
    """Where a process sits: its rank in a group of `ranks`, the GPU, the port where the group meets."""

    rank: int
    ranks: int
    gpu: int
    port: int


class Task(NamedTuple):
    """What every process of a run does. seconds: of one timing.

    alone: only one rank of groups of these sizes is timed, its messages unsent.
    """

    device: str
    depth: int
    shapes: tuple[Shape, ...]
    seconds: float
    alone: tuple[int, ...] = ()


class Unsent:
    """Collectives of the first of `size` ranks that keeps its messages: results have their shapes, not their values."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Its own part."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Its own piece as often as there are ranks."""
        return torch.cat([tensor] * self.size, dim)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """What it would send."""
        return tensor.contiguous()

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor."""
        del source
        return tensor

    def send(self, tensor: Tensor, to: int) -> Pending:
        """There is nobody."""
        raise NotImplementedError(f"{tensor.shape} to rank {to}: decode groups have one stage")

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """There is nobody."""
        raise NotImplementedError(f"{tensor.shape} from rank {source}: groups have one stage")

    def barrier(self) -> None:
        """Nobody to wait for."""


def run(task: Task, ranks: int, n_devices: int, end: float) -> Iterator[Said]:
    """Everything that groups of `ranks` say until all are done or `end` (time.monotonic) is reached.

    As many groups as there are devices for share the shapes. K3Error when a process ends early.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[Any] = []
    n_groups = n_devices // ranks
    for group in range(n_groups):
        own = task._replace(shapes=task.shapes[group::n_groups])
        port = free_ports(1)[0]
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            seat = Seat(rank, ranks, group * ranks + rank, port)
            process = context.Process(target=work, args=(seat, own, there), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
    try:
        yield from _heard(pipes, end)
    finally:
        for process in processes:
            process.kill()
            process.join(10.0)


def _heard(pipes: list[Connection], end: float) -> Iterator[Said]:
    while pipes and (left := end - time.monotonic()) > 0:
        for pipe in wait(pipes, timeout=left):
            assert isinstance(pipe, Connection)
            try:
                said = pipe.recv()
            except EOFError as error:
                raise K3Error(
                    "a rank ended before it was done; its own message is above"
                ) from error
            if said is None:
                pipes.remove(pipe)
            else:
                yield said
    if pipes:
        yield Note("the time is over; what is missing was not measured")


def end_with_parent() -> None:
    """Watch the process that started this one, and end when it has."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a process that multiprocessing started"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def work(seat: Seat, task: Task, pipe: Connection) -> None:
    """A process: join the group, measure every layout, say None at the end and wait to be stopped."""
    end_with_parent()
    started = time.monotonic()
    name = task.device if task.device == "cpu" else f"{task.device}:{seat.gpu}"
    device = open_device(name, 1)
    place = Mesh(cp=seat.ranks).place(seat.rank)
    groups = join(place, "127.0.0.1", seat.port, device.collective_backend, JOIN_S)
    model = stand_in(task.device, task.depth)

    def say(said: Said) -> None:
        if seat.rank == 0:
            pipe.send(said)

    say(Note(f"{seat.ranks} ranks met after {time.monotonic() - started:.0f} s"))
    measure_all = partial(measure, task=task, model=model, device=device, say=say)
    for n in task.alone:
        kept = Unsent(n)
        measure_all("tp", Mesh(tp=n).place(0), Groups(kept, SoloCollectives(), kept))
        measure_all("cp", Mesh(cp=n).place(0), Groups(kept, kept, kept))
    if seat.ranks == 1 and not task.alone:
        measure_all("one", place, groups)
    elif seat.ranks > 1:
        split = Groups(groups.shard, SoloCollectives(), groups.pipeline)
        measure_all("tp", Mesh(tp=seat.ranks).place(seat.rank), split)
        measure_all("cp", place, groups)
        for message in messages(model, groups, device, task.seconds):
            say(message)
    pipe.send(None)
    time.sleep(JOIN_S)  # a group's memory and graphs are left to the end of the process


def measure(
    layout: str,
    place: Place,
    groups: Groups,
    *,
    task: Task,
    model: StandIn,
    device: Device,
    say: Callable[[Said], None],
) -> None:
    """All shapes in one layout."""
    started = time.monotonic()
    ranks, alone = place.mesh.size, isinstance(groups.shard, Unsent)
    stage = sharded(model, place, groups, device)
    say(Note(f"{layout} {ranks}: {stage.ops.chosen}, {time.monotonic() - started:.0f} s"))
    for group in sorted({shape.group for shape in task.shapes}):
        shapes = [shape for shape in task.shapes if shape.group == group]
        caches = Caches(model, place, device, shapes, group)
        for shape in shapes:
            runner = runner_of(device, shape)
            step = step_of(stage, caches, device, runner, shape)
            timed = timed_step(step, runner, device, groups, shape, task.seconds)
            say(Point(layout, ranks, *shape, *timed, alone))
            del step, runner
        del caches
        release(device)
    del stage
    release(device)


def release(device: Device) -> None:
    """Give freed memory back, so that the next pools find it in one piece."""
    gc.collect()
    if device.can_capture:
        torch.cuda.empty_cache()


def timed_step(
    step: VerifyStep,
    runner: CudaGraphs | object,
    device: Device,
    groups: Groups,
    shape: Shape,
    seconds: float,
) -> tuple[float, float, dict[str, float]]:
    """Microseconds of a replay and of the loop, kernels of a step by class."""
    rows = range(1, shape.rows + 1)

    def launch() -> None:
        step.launch(rows, shape.length)

    launch()
    replay = launch
    if isinstance(runner, CudaGraphs):
        bound = runner.bound(shape.length + shape.group)
        key = StepKey(shape.rows, bound, generous(GREEDY), shape.group, proposes=True)
        replay = lambda: runner.run(key, lambda: None)  # noqa: E731
    n = agreed(groups, device, seconds / span_s(device, replay, 2))
    step_us = 1e6 * min(span_s(device, replay, n) for _ in range(2))
    kernels = by_class(device, replay) if device.can_capture else {}
    return step_us, loop_us(step, rows, shape.length, n), kernels


def span_s(device: Device, call: Callable[[], None], n: int) -> float:
    """Mean seconds of `n` calls back to back."""
    device.synchronize()
    started = time.perf_counter()
    for _ in range(n):
        call()
    device.synchronize()
    return (time.perf_counter() - started) / n


def agreed(groups: Groups, device: Device, n: float) -> int:
    """Repeats that rank 0 found right, from 3 to 50."""
    wanted = torch.tensor(max(3, min(50, round(n))), device=device.torch_device)
    return int(groups.shard.broadcast(wanted))


def loop_us(step: VerifyStep, rows: Sequence[int], length: int, n: int) -> float:
    """Of one of `n` steps with another in flight, from answer to answer."""
    earlier = step.launch(rows, length)
    newer = step.launch(rows, length)
    earlier.tokens()
    started = time.perf_counter()
    for _ in range(n):
        earlier, newer = newer, step.launch(rows, length)
        earlier.tokens()
    taken = time.perf_counter() - started
    newer.tokens()
    return 1e6 * taken / n


def by_class(device: Device, replay: Callable[[], None], n: int = 2) -> dict[str, float]:
    """Microseconds of one replay's kernels by `CLASSES`."""
    device.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(n):
            replay()
        device.synchronize()
    spent: Counter[str] = Counter()
    for event in seen.events() or []:
        if event.device_type.name == "CUDA":
            spent[class_of(event.name)] += event.time_range.elapsed_us() / n
    return dict(spent)


def class_of(kernel: str) -> str:
    """Of a kernel's name."""
    for name, words in CLASSES.items():
        if kernel.startswith(words):
            return name
    for word, name in LIBRARIES.items():
        if word in kernel:
            return name
    return "products" if any(word in kernel for word in PRODUCTS) else "other"


def messages(model: StandIn, groups: Groups, device: Device, seconds: float) -> Iterator[Message]:
    """The sums of layers and the exchange of MLA layers, `IN_A_ROW` of them recorded together."""
    spec, ranks = model.spec, groups.shard.size
    at, half = device.torch_device, torch.bfloat16
    for tokens in TOKENS:
        summed = torch.zeros(tokens, spec.hidden_size, dtype=half, device=at)
        width = 2 * spec.mla.v_dim + 4
        shape = (ranks, tokens, spec.mla.n_heads // ranks, width)
        dealt = torch.zeros(shape, dtype=torch.uint8, device=at)
        for what, call, n_bytes in (
            ("sum", partial(groups.shard.all_reduce, summed), 2 * summed.numel()),
            ("exchange", partial(groups.context.all_to_all, dealt), dealt[1:].numel()),
        ):
            replay = device.capture(partial(_in_a_row, call)).replay
            n = agreed(groups, device, seconds / span_s(device, replay, 2))
            spent = span_s(device, replay, n) / IN_A_ROW
            yield Message(what, ranks, tokens, n_bytes, 1e6 * spent)


def _in_a_row(call: Callable[[], object]) -> None:
    for _ in range(IN_A_ROW):
        call()
