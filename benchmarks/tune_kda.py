"""Try shapes of the KDA kernels and of the merge on this GPU; `tuned` in their files holds the winners.

    python benchmarks/tune_kda.py [--only TEXT] [--best 6]    (on Hopper)

Each variant is compiled, checked against float64 and timed; one that does not fit the card is named.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import torch
from harness import Card, Stopwatch, measure_card
from k3_kernels.triton import kda_decode, kda_verify
from k3_kernels.triton.combine import merge
from kernel_kda import ERROR_LIMIT, KdaCase, Row, cases, error, expected, make
from triton import OutOfResources

DECODE = [
    kda_decode.Tuning(rows, warps, fetch)
    for rows, warps in ((32, 4), (16, 4), (8, 4), (32, 8))
    for fetch in (False, True)
]
TILE = kda_verify.tuned(396)
VERIFY = [
    TILE,
    *(replace(TILE, hopper=True, prepare_warps=w) for w in (2, 4, 8)),
    *(
        replace(TILE, hopper=True, rows=r, channels=c, warps=w)
        for r, c, w in ((128, 16, 4), (32, 32, 2))
    ),
    kda_verify.tuned(1 << 20),
]


def main() -> None:
    """One line per variant, best first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--best", type=int, default=6)
    arguments = parser.parse_args()
    card, watch = measure_card(), Stopwatch()
    for case in cases():
        if arguments.only in case.name:
            _case(case, watch, card, arguments.best)
    ranks, tokens, heads, dim = 8, 512, 12, 512
    o = torch.randn(ranks, tokens, heads, dim, device="cuda").bfloat16()
    lse = torch.randn(ranks, tokens, heads, device="cuda")
    for queries in (1, 2, 4):
        print(
            f"merge {queries}: {watch.time_us(partial(merge, o, lse, queries)):.2f} us", flush=True
        )


def _case(case: KdaCase, watch: Stopwatch, card: Card, best: int) -> None:
    inputs = make(case)
    want, exact = expected(inputs)
    found: list[tuple[float, object, str]] = []
    for tuning in DECODE if case.group == 1 else VERIFY:
        mine = inputs.copy()
        out = torch.full(want.shape, float("nan"), device="cuda", dtype=torch.float32)
        if case.group == 1:
            u, raw, beta, rule, cache, slots = mine.arguments()
            flat = (u[:, 0], raw[:, 0], beta[:, 0], rule, cache, slots, out[:, 0])
            call = partial(kda_decode.decode, *flat, tuning)
        else:
            call = partial(kda_verify.verify, *mine.arguments(), mine.column, out, tuning)
        try:
            call()
        except OutOfResources as reason:
            print(f"{case.name}: {tuning} {reason}", flush=True)
            continue
        wrong = error(out, mine.cache, want, exact)
        note = "" if wrong <= ERROR_LIMIT else f" WRONG {wrong:.1e}"
        found.append((watch.time_us(call), tuning, note))
    for time_us, tuning, note in sorted(found, key=lambda each: each[0])[:best]:
        row = Row(case.name, "", 0.0, ERROR_LIMIT, time_us, case.n_bytes, case.n_flops)
        print(
            f"{case.name}: {time_us:8.1f} us {card.floor_us(row) / time_us:.2f} {tuning}{note}",
            flush=True,
        )


if __name__ == "__main__":
    main()
