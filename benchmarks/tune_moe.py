# ruff: noqa: TID251
"""Try shapes of the MXFP4 experts' products on this GPU; `tuned` in `k3_kernels.triton.moe` holds the winners.

    python benchmarks/tune_moe.py [--held 56,7] [--tokens 8,32,256] [--best 6]

Held: experts of this rank, of 896 of which a token chooses 16. Several processes compile first; each variant is
checked against float64 and timed; one that does not fit the card is named.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch
from harness import Stopwatch, relative_error
from k3_kernels.reference import moe as reference
from k3_kernels.triton import moe
from k3_kernels.triton.moe_ops import TritonMoe
from kernel_moe import BETA, ERROR_LIMIT, LINEAR_BETA, TOP_K, Z, choices, draw, exact, make
from triton import OutOfResources

BUILDERS = 16
SHAPES = [
    moe.Tuning(rows, tokens, 128, stages, warps, 1)
    for rows, tokens, stages, warps in (
        *((64, 16, 3, 2), (64, 16, 4, 2), (64, 16, 3, 4), (64, 32, 3, 2), (64, 32, 3, 4)),
        *((64, 64, 3, 4), (64, 64, 2, 4), (32, 16, 3, 1), (128, 16, 3, 4), (128, 32, 3, 4)),
        *((128, 64, 3, 4), (128, 64, 3, 8), (128, 32, 3, 8), (128, 64, 2, 4)),
    )
]
PROGRAMS = (2, 4, 8)  # of a multiprocessor


def main() -> None:
    """One line per variant, best first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--held", default="56,7", help="experts of this rank")
    parser.add_argument("--tokens", default="8,32,256", help="of a step")
    parser.add_argument("--best", type=int, default=6, help="variants shown of each case")
    arguments = parser.parse_args()
    held, tokens = ([int(n) for n in x.split(",")] for x in (arguments.held, arguments.tokens))
    start = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(BUILDERS, start) as builders:
        fitting = [s for s, fits in zip(SHAPES, builders.map(_build, SHAPES), strict=True) if fits]
    print(f"{len(fitting)} of {len(SHAPES)} fit: built", flush=True)
    for n_held, n_tokens in itertools.product(held, tokens):
        _case(n_held, n_tokens, fitting, arguments.best)


def _build(shape: moe.Tuning) -> bool:
    try:
        _call(7, 16, shape)()
    except OutOfResources as reason:
        print(f"{shape} {reason}", flush=True)
        return False
    torch.cuda.synchronize()
    return True


def _call(n_held: int, n_tokens: int, shape: moe.Tuning) -> Callable[[], torch.Tensor]:
    n_sms = torch.cuda.get_device_properties(0).multi_processor_count
    weights = TritonMoe(n_sms).prepare(make("MXFP4", n_held))
    z, (ids, weight) = draw(n_tokens, Z), choices(n_tokens)
    return lambda: moe.experts(z, ids, weight, weights, BETA, LINEAR_BETA, n_sms, shape)


def _case(n_held: int, n_tokens: int, shapes: list[moe.Tuning], best: int) -> None:
    torch.manual_seed(n_tokens)
    n_sms = torch.cuda.get_device_properties(0).multi_processor_count
    plain = make("MXFP4", n_held)
    weights, z, (ids, weight) = (
        TritonMoe(n_sms).prepare(plain),
        draw(n_tokens, Z),
        choices(n_tokens),
    )
    want = reference.experts(z.double(), ids, weight.double(), exact(plain), BETA, LINEAR_BETA)
    watch = Stopwatch(15)
    found: list[tuple[float, moe.Tuning, str]] = []
    for shape, programs in itertools.product(shapes, PROGRAMS):
        tuning = replace(shape, programs=programs)

        def call(tuning: moe.Tuning = tuning) -> torch.Tensor:
            return moe.experts(z, ids, weight, weights, BETA, LINEAR_BETA, n_sms, tuning)

        wrong = relative_error(call(), want) if want.any() else 0.0
        note = "" if wrong <= ERROR_LIMIT else f" WRONG {wrong:.1e}"
        found.append((watch.time_us(call), tuning, note))
    used = ids[ids < n_held]
    print(
        f"{n_held} held, {n_tokens} tokens x {TOP_K}: {used.unique().numel()} experts, {used.numel()} pairs"
    )
    for time_us, tuning, note in sorted(found, key=lambda each: each[0])[:best]:
        print(f"{time_us:8.1f} us {tuning}{note}", flush=True)


if __name__ == "__main__":
    main()
