# ruff: noqa: TID251  (timing needs torch.cuda's events, flushes and graphs directly)
"""How every kernel here is measured: what a row says, how long a call takes, what the card can do.

A call is timed inside a CUDA graph (unless it cannot be captured), after the L2 has been replaced by reading a
buffer several times its size, between two events; the reading is long enough that the host is always ahead. The
median of many calls counts. The floor of a row is the larger of its bytes over the measured copy bandwidth and its
operations over the measured bfloat16 matrix rate: no version runs much faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

FLUSH_BYTES = 640 << 20  # ten times an H200's L2; reading it takes about 0.15 ms
WARM_UPS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation on one case. Times in microseconds; `error` relative to float64."""

    case: str
    backend: str
    error: float
    error_limit: float
    time_us: float
    n_bytes: float  # the fewest bytes through device memory
    n_flops: float  # the fewest operations of the matrix units
    note: str = ""

    @property
    def right(self) -> bool:
        """Whether the result is close enough to float64; NaN never is."""
        return self.error <= self.error_limit


class Case(Protocol):
    """What a section measures: anything with a name."""

    @property
    def name(self) -> str:
        """Unique within the section, as in the table."""
        ...


class Section(Protocol):
    """A module `kernel_*.py`: its cases, and the rows of one case.

    `wanted(peer)` says whether a peer takes part; ours always does. A peer that cannot be imported is left out
    with a line from `missing_peers`, never silently.
    """

    TITLE: str

    def cases(self) -> list[Case]:
        """All cases, cheap to make: tensors come into being in `run`."""
        ...

    def run(self, case: Case, wanted: Callable[[str], bool]) -> list[Row]:
        """Ours and every wanted peer on one case: checked first, then timed."""
        ...

    def missing_peers(self) -> list[str]:
        """One line per peer that is not here, with the reason."""
        ...


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU and its two ceilings as measured in this run."""

    name: str
    bytes_per_s: float
    flops_per_s: float

    def floor_us(self, row: Row) -> float:
        """The least time the row's bytes and operations take."""
        return 1e6 * max(row.n_bytes / self.bytes_per_s, row.n_flops / self.flops_per_s)

    def bound(self, row: Row) -> str:
        """Which of the two sets the floor."""
        memory = row.n_bytes / self.bytes_per_s >= row.n_flops / self.flops_per_s
        return "bytes" if memory else "operations"


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the float64 result; both finite, or equal infinities."""
    g, e = got.double().cpu(), expected.double().cpu()
    same = g == e
    difference = torch.where(same, 0.0, g - e)
    return float(difference.norm() / torch.where(e.isfinite(), e, 0.0).norm().clamp(min=1e-300))


class Stopwatch:
    """Times calls on the current GPU; owns the buffer that replaces the L2."""

    def __init__(self, repeats: int = 30) -> None:
        self.repeats = repeats
        self._flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def time_us(self, call: Callable[[], object], *, captured: bool = True) -> float:
        """Median of `repeats` calls, each with a cold L2. captured=False: launched by the host each time."""
        for _ in range(WARM_UPS):
            call()
        torch.cuda.synchronize()
        run = _capture(call) if captured else call
        spans: list[float] = []
        for _ in range(self.repeats):
            self._flush.sum()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            spans.append(1e3 * start.elapsed_time(end))
        return statistics.median(spans)


def _capture(call: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure_card() -> Card:
    """Copy bandwidth (bytes read plus written) of 4 GB, bfloat16 rate of an 8192^3 product of random data."""
    watch = Stopwatch(repeats=10)
    source = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    # Not captured: in a graph a copy goes to the copy engines, which are slower than the multiprocessors.
    copy_us = watch.time_us(lambda: target.copy_(source), captured=False)
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_us = watch.time_us(lambda: a @ b)
    bandwidth = 2e6 * source.numel() * source.element_size() / copy_us
    return Card(torch.cuda.get_device_name(), bandwidth, 2e6 * n**3 / product_us)


def device_name(device: str) -> str:
    """What the machine's first GPU is called; "CPU" for a CPU."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def best_time(rows: Iterable[Row]) -> float:
    """Time of the fastest right row; infinity without one."""
    return min((row.time_us for row in rows if row.right), default=float("inf"))


def bars(
    path: Path,
    cases: Sequence[str],
    series: Mapping[str, Sequence[float]],
    label: str,
    *,
    line: float | None = None,
    is_log: bool = False,
) -> str:
    """A picture of horizontal bars, one group per case and one colour per series; returns Markdown that shows it.

    NaN leaves a bar out. label: what the bars measure, with its unit; line: a value to compare all with.
    """
    if find_spec("matplotlib") is None:
        return f"Not drawn, matplotlib is not installed: {label}."
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    plt: Any = pyplot  # its stubs are partial
    height = 0.8 / len(series)
    figure, axes = plt.subplots(figsize=(9, 1 + 0.5 * len(cases)), layout="constrained")
    for i, (name, values) in enumerate(series.items()):
        axes.barh([case + i * height for case in range(len(cases))], values, height, label=name)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(cases))], cases, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    if is_log:
        axes.set_xscale("log")
    if line is not None:
        axes.axvline(line, color="grey", linewidth=0.5)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return f"![{label}]({path.name})"
