"""`k3-bench step`: where the time of a decode step goes, at several batch sizes, on a cluster of its own.

Decode's own histograms are read again and again; the stretches between two readings count in which every step had
exactly `batch` rows. Their wall time per step is split into the model's forward, the rest of the rank's step (tables,
sampling, read-back), and what remains: front, channel and waiting. The loop's own share is all but the forward.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from k3.bench.load import Arrivals, drive
from k3.bench.prompts import RandomWorkload
from k3.cluster import LocalCluster, Options, get
from k3.errors import K3Error

STEP = "k3_decode_step_seconds"
FORWARD = "k3_decode_forward_seconds"
ROWS = "k3_decode_batch_size"
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Reading:
    """Decode's histograms at one moment."""

    at_s: float
    n_rows: float  # summed over steps
    n_steps: float
    step_s: float
    forward_s: float

    def since(self, other: Reading) -> Reading:
        """What happened between two readings."""
        return Reading(
            self.at_s - other.at_s,
            self.n_rows - other.n_rows,
            self.n_steps - other.n_steps,
            self.step_s - other.step_s,
            self.forward_s - other.forward_s,
        )

    def plus(self, other: Reading) -> Reading:
        """Two stretches together."""
        return Reading(
            self.at_s + other.at_s,
            self.n_rows + other.n_rows,
            self.n_steps + other.n_steps,
            self.step_s + other.step_s,
            self.forward_s + other.forward_s,
        )


@dataclass(frozen=True, slots=True)
class Split:
    """Mean seconds of one step at one batch size."""

    cp: int
    batch: int
    n_steps: int
    wall_s: float
    forward_s: float
    rank_rest_s: float
    outside_s: float

    @property
    def own_share(self) -> float:
        """Share of a step outside the model's forward."""
        return 1.0 - self.forward_s / self.wall_s


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    p.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="rows decoding at once")
    p.add_argument(
        "--cp", type=_sizes, default="1", help="sizes of decode's context group, for example 1,2"
    )
    p.add_argument("--prompt-tokens", type=int, default=16, help="of each request")
    p.add_argument("--output-tokens", type=int, default=256, help="of each request")
    p.add_argument("--json", type=Path, help="write the figures there")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def read(ops: str) -> Reading:
    """One look at decode's /metrics. K3Error when a series is missing."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(get(ops, "/metrics").body):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    try:
        return Reading(
            time.monotonic(),
            values[f"{ROWS}_sum"],
            values[f"{STEP}_count"],
            values[f"{STEP}_sum"],
            values[f"{FORWARD}_sum"],
        )
    except KeyError as error:
        raise K3Error(f"{ops}/metrics has no series {error}; is it a k3-decode?") from error


def together(stretches: list[Reading], batch: int) -> Reading:
    """The stretches in which every step had `batch` rows, less those at the edges, which also hold idle time."""
    full = [s.n_rows == batch * s.n_steps for s in stretches]
    total = Reading(0, 0, 0, 0, 0)
    for before, stretch, is_full, after in zip(
        full, stretches[1:], full[1:], full[2:], strict=False
    ):
        if before and is_full and after:
            total = total.plus(stretch)
    return total


async def window(cluster: LocalCluster, cp: int, batch: int, args: argparse.Namespace) -> Split:
    """Let `batch` requests decode together; K3Error when they hardly did."""
    info = await asyncio.to_thread(get, cluster.router.ops, "/tokenizer_info")
    vocab = int(json.loads(info.body)["vocab_size"])
    work = RandomWorkload(args.prompt_tokens, args.output_tokens, vocab, seed=batch)
    load = asyncio.create_task(
        drive(cluster.url, work, Arrivals(batch, batch, 0.0, 0), timeout_s=300.0)
    )
    ops = cluster.decodes[0].ops
    stretches: list[Reading] = []
    last = await asyncio.to_thread(read, ops)
    while not load.done():
        await asyncio.sleep(POLL_S)
        now = await asyncio.to_thread(read, ops)
        if now.n_steps > last.n_steps:
            stretches.append(now.since(last))
            last = now
    failed = [r.error for r in await load if r.error]
    if failed:
        raise K3Error(f"batch {batch}: {len(failed)} of {batch} requests failed: {failed[0]}")
    total = together(stretches, batch)
    n = total.n_steps
    if n < 8:
        raise K3Error(f"batch {batch}: {n:g} steps with all rows; raise --output-tokens")
    step, forward = total.step_s / n, total.forward_s / n
    return Split(cp, batch, int(n), total.at_s / n, forward, step - forward, total.at_s / n - step)


def table(splits: list[Split]) -> Table:
    """One row per group and batch size, milliseconds."""
    out = Table(title="one decode step, ms")
    names = (
        "cp",
        "batch",
        "steps",
        "wall",
        "forward",
        "rest of the rank",
        "front and channel",
        "own share",
    )
    for name in names:
        out.add_column(name, justify="right")
    for s in splits:
        times = (s.wall_s, s.forward_s, s.rank_rest_s, s.outside_s)
        row = [
            str(s.cp),
            str(s.batch),
            str(s.n_steps),
            *(f"{t * 1e3:.2f}" for t in times),
            f"{s.own_share:.0%}",
        ]
        out.add_row(*row)
    return out


def run(args: argparse.Namespace, console: Console) -> int:
    """0 when every batch size could be measured."""
    rows = ("--max-rows", str(max(args.batch)))
    splits: list[Split] = []
    for cp in args.cp:
        options = Options(decode_flags=(*rows, "--cp", str(cp)), prefill_flags=rows)
        with LocalCluster(options) as cluster:
            splits += [asyncio.run(window(cluster, cp, batch, args)) for batch in args.batch]
    console.print(table(splits))
    if args.json is not None:
        figures = [asdict(s) | {"own_share": s.own_share} for s in splits]
        tree = {"cores": os.cpu_count(), "prompt_tokens": args.prompt_tokens, "steps": figures}
        args.json.write_text(json.dumps(tree, indent=2) + "\n")
    return 0
