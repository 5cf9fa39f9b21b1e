# ruff: noqa: TID251
"""Try block shapes of the Triton attention on this GPU; `blocks_for` in `k3_kernels.triton.mla_ops` holds the winners.

    python benchmarks/tune_mla.py [--only TEXT] [--best 6]

Each variant is compiled, checked against float64 and timed; one that does not fit the card is named.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace

import torch
from harness import Stopwatch, measure_card, relative_error
from k3_kernels.triton.mla_ops import Blocks, TritonAttention
from kernel_mla import ERROR_LIMIT, Attention, Row, cases, make
from triton import OutOfResources

FEW = [
    Blocks(16, 64, True, warps=4, hopper=True),
    Blocks(16, 64, True, warps=8, hopper=True),
]
MIDDLE = [
    Blocks(64, 64, False, warps=8, hopper=True),
    Blocks(64, 64, False, warps=4, hopper=True, wide=True),
    Blocks(32, 64, True, warps=8, hopper=True),
]
MANY = MIDDLE[:2]


def variants(case: Attention) -> list[Blocks]:
    """What is tried on a case; short contexts also try how finely a row may be split."""
    queries = case.heads * case.group
    shapes = FEW if queries <= 16 else MIDDLE if queries <= 128 else MANY
    if case.keys > 8192:
        return shapes
    return [replace(b, fewest=f) for b, f in itertools.product(shapes, (1, 2, 4))]


def _n_sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def main() -> None:
    """One line per variant, best first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--best", type=int, default=6)
    arguments = parser.parse_args()
    chosen = [c for c in cases() if isinstance(c, Attention) and arguments.only in c.name]
    card, watch = measure_card(), Stopwatch()
    for case in chosen:
        step = make(case)
        expected = step.expected()
        rows: list[tuple[float, Row, Blocks]] = []
        for blocks in variants(case):
            call = step.call(TritonAttention(_n_sms(), blocks))
            try:
                error = relative_error(call()[0], expected)
            except OutOfResources as reason:
                print(f"{case.name}: {blocks} {reason}", flush=True)
                continue
            time_us = watch.time_us(call)
            row = Row(case.name, "", error, ERROR_LIMIT, time_us, case.n_bytes, case.n_flops)
            rows.append((time_us, row, blocks))
        for time_us, row, blocks in sorted(rows, key=lambda each: each[0])[: arguments.best]:
            wrong = "" if row.right else f" WRONG {row.error:.1e}"
            share = card.floor_us(row) / time_us
            print(
                f"{case.name}: {time_us:8.1f} us {share:.2f} of floor {blocks}{wrong}", flush=True
            )


if __name__ == "__main__":
    main()
