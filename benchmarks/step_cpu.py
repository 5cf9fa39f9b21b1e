"""Time of one decode step's forward on a CPU: `python benchmarks/step_cpu.py [--backends reference native]`.

Model step only (layers, final norm, head), one thread, embedded model in float32: `rows` verify groups of `group`
tokens with `--context` tokens cached. Backends take turns of ten steps, so that both see the same machine; of their CPU
times the lower decile counts, which another process on the core disturbs least.
"""

from __future__ import annotations

import argparse
import time

import torch
from k3_kernels.api import Backends, select

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


def main() -> None:
    """Print one table row per shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", nargs="+", default=["reference", "native"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--turns", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| rows | tokens each |", " | ".join(f"{name}, ms" for name in args.backends), "| ratio |"
    )
    print("| ---: | ---: |", " | ".join("---:" for _ in args.backends), "| ---: |")
    with torch.inference_mode():
        for rows, group in SHAPES:
            runners = [Runner(name, rows, group, args.context) for name in args.backends]
            times: list[list[float]] = [[] for _ in runners]
            for _ in range(args.turns):
                for runner, column in zip(runners, times, strict=True):
                    column += [runner.step() for _ in range(10)]
            for column in times:
                column.sort()
            ms = [column[len(column) // 10] * 1e3 for column in times]
            figures = " | ".join(f"{t:.2f}" for t in ms)
            print(f"| {rows} | {group} | {figures} | {ms[0] / ms[-1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
