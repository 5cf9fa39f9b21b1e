"""Time of one decode step's forward on a CPU: `python benchmarks/step.py --cpu [--backends reference native]`.

Model step only (layers, final norm, head), one thread, embedded model in float32: `rows` verify groups of `group`
tokens with `--context` tokens cached. Backends take turns of ten steps, so that both see the same machine; of their CPU
times the lower decile counts, which another process on the core disturbs least. `--compare llama.cpp` measures
llama.cpp beside ours instead (`compare_llama.py`) and writes a table. `--library x86-64-v3` is what CPUs without
AVX-512 run; torch is held to the same by ATEN_CPU_CAPABILITY=avx2.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from compare_llama import compare
from k3_kernels.api import Backends, select
from k3_kernels.cpu import build, library
from llama_child import interpreter

from k3.config.resolve import EMBEDDED_MODEL
from k3.model.batch import VerifyBatch
from k3.model.k3 import Stage
from k3.model.registry import open_stage
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import SOLO
from tests.model_runner import Pools

SHAPES = ((1, 1), (8, 1), (1, 8), (8, 8))
CPU = torch.device("cpu")


def stage(backend: str) -> Stage:
    """The embedded model by one backend."""
    ops = select(Backends(backend, backend, backend), CPU)
    return open_stage(EMBEDDED_MODEL, SOLO, solo_groups(), ops, dtype="float32", device=CPU)


class Runner:
    """A model with `rows` requests prefilled; every step checks a fresh random group at the same place."""

    def __init__(self, backend: str, rows: int, group: int, context: int) -> None:
        self.stage = stage(backend)
        self.pools = Pools(self.stage, rows, context + group, page_tokens=16, columns=group)
        self.random = torch.Generator().manual_seed(rows)
        self.group = group
        for request in self.pools.requests:
            self.pools.chunk([(request, self.ids(context))])

    def ids(self, n: int) -> list[int]:
        """Random tokens of the vocabulary's words."""
        return torch.randint(0, 3800, (n,), generator=self.random).tolist()

    def batch(self) -> VerifyBatch:
        """One group per request."""
        return self.pools.verify_batch([(r, self.ids(self.group)) for r in self.pools.requests])

    def step(self) -> float:
        """CPU seconds of one step."""
        batch = self.batch()
        started = time.thread_time()
        output = self.stage.forward(None, self.pools.caches, batch)
        self.stage.logits(self.stage.hidden(output.frame))
        return time.thread_time() - started

    def ten(self) -> list[float]:
        """CPU seconds of a turn's steps."""
        return [self.step() for _ in range(10)]


def table(backends: Sequence[str], context: int, turns: int) -> None:
    """Print one row per shape."""
    print("| rows | tokens each |", " | ".join(f"{name}, ms" for name in backends), "| ratio |")
    print("| ---: | ---: |", " | ".join("---:" for _ in backends), "| ---: |")
    for rows, group in SHAPES:
        runners = [Runner(name, rows, group, context) for name in backends]
        times: list[list[float]] = [[] for _ in runners]
        for _ in range(turns):
            for runner, column in zip(runners, times, strict=True):
                column += runner.ten()
        for column in times:
            column.sort()
        ms = [column[len(column) // 10] * 1e3 for column in times]
        figures = " | ".join(f"{t:.2f}" for t in ms)
        print(f"| {rows} | {group} | {figures} | {ms[0] / ms[-1]:.1f} |", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print; with `--compare` the exit status is 1 when an answer was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=["reference", "native"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--turns", type=int, help="default 6, with --compare 3")
    parser.add_argument("--library", choices=build.variants(), help="default: this CPU's best")
    parser.add_argument("--compare", choices=["llama.cpp"])
    parser.add_argument("--llama-python", type=Path, help="an interpreter that imports llama_cpp")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    if args.library:
        library.variant = lambda: args.library
    if args.compare is None:
        with torch.inference_mode():
            table(args.backends, args.context, args.turns or 6)
        return
    python = interpreter(args.llama_python)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{datetime.now(UTC):%Y-%m-%d}-step-cpu-llama.md"
    with torch.inference_mode():
        runners = {
            name: Runner(backend, 1, 1, args.context)
            for name, backend in (("eager torch", "reference"), ("native", "native"))
        }
    ours = {name: runner.ten for name, runner in runners.items()}
    is_right = compare(path, python, ours, args.context, args.turns or 3)
    raise SystemExit(0 if is_right else 1)


if __name__ == "__main__":
    main()
