# ruff: noqa: TID251  (a GPU for each process, and a plain copy between two as the yardstick)
"""Bytes from GPU to GPU by the transfer agent that services use, beside a plain peer copy.

    python benchmarks/transfer.py [--gib 4] [--out benchmarks/results]

Two processes, a GPU each, an agent each; the sender writes into the receiver's pool as services do: prepared lists,
a few handles in flight, a record behind every handle, whose arrival ends the clock. Pages of K3 (24 layers together,
1.7 MiB) in random order and in runs, the same bytes cut by layer (72 KiB), states of a KDA stack. Every byte that
arrived is compared with what was sent. Everything is measured twice: with all pieces of a handle in one call of the
driver, as services post them between GPUs, and with a call for each.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from harness import bars
from torch import Tensor

from k3.transfer.agent import Handle, Region, Stripes
from k3.transfer.nixl import NIXL_VERSION, NixlAgent

HERE = Path(__file__).parent
DEADLINE_S = 60.0
IN_FLIGHT = 4  # handles, as `transfer.handles_in_flight`
WARM_UPS, ROUNDS = 3, 15
SENT, RECEIVED = 1, 2  # seeds of the pools
LATENT_ROW = 576 * 2
PAGE = 64 * LATENT_ROW


@dataclass(frozen=True, slots=True)
class Case:
    """`piece` bytes each; a handle carries `per_handle` of them; bar: GB/s it should reach, 0 for none."""

    name: str
    piece: int
    per_handle: int
    in_runs: bool
    bar: float


CASES = (
    Case("pages, 24 layers together, random order", 24 * PAGE, 64, in_runs=False, bar=240),
    Case("pages, 24 layers together, in runs", 24 * PAGE, 64, in_runs=True, bar=350),
    Case("states, 69 layers of 12 heads", 69 * 12 * 128 * 128 * 4, 4, in_runs=True, bar=350),
    Case("pages, layer by layer, random order", PAGE, 1536, in_runs=False, bar=0),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What a case reached: GB/s over `n` pieces, and whether every byte arrived."""

    case: Case
    n: int
    rate: float
    is_right: bool
    is_batched: bool

    def text(self) -> str:
        """Of the table."""
        case = self.case
        bar = f"{case.bar:g}" if case.bar else ""
        calls = "one" if self.is_batched else "one a piece"
        cells = (case.name, calls, str(self.n), str(case.piece), f"{self.rate:.1f}", bar)
        return f"| {' | '.join(cells)} | {'yes' if self.is_right else 'NO'} |"


def handles(case: Case, n: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Source and target indices of every handle; all pieces once."""
    rng = np.random.default_rng(seed)
    source, target = (
        (np.arange(n), np.arange(n)) if case.in_runs else (rng.permutation(n), rng.permutation(n))
    )
    for at in range(0, n, case.per_handle):
        chosen = slice(at, at + case.per_handle)
        yield source[chosen].astype(np.int32), target[chosen].astype(np.int32)


def random_words(gpu: int, n_bytes: int, seed: int) -> Tensor:
    """The same on every GPU of a kind."""
    generator = torch.Generator(f"cuda:{gpu}").manual_seed(seed)
    make = {"dtype": torch.int64, "device": f"cuda:{gpu}"}
    words = torch.randint(1 << 62, (n_bytes // 8,), generator=generator, **make)
    torch.cuda.synchronize(gpu)
    return words


def pool_of(gpu: int, n_bytes: int, seed: int, agent: NixlAgent) -> tuple[Tensor, Region]:
    """Random bytes on a GPU, registered as one pool."""
    torch.cuda.set_device(gpu)
    words = random_words(gpu, n_bytes, seed)
    region = Region("pool", words.data_ptr(), gpu, "VRAM", 8, words.numel())
    agent.register([region])
    return words, region


def stripes(region: Region, piece: int) -> Stripes:
    """The pool as equal pieces."""
    n = region.n_bytes // piece
    return Stripes(region.memory, region.device, (region.base,), piece, piece, n)


def receive(n_bytes: int, gpu: int, pipe: Connection) -> None:
    """The other process: tells its pool and waits for records."""
    agent = NixlAgent("receiver")
    words, region = pool_of(gpu, n_bytes, RECEIVED, agent)
    pipe.send((agent.name, agent.metadata(), region))
    while True:
        order = pipe.recv()
        if order is None:
            agent.close()
            return
        if isinstance(order, Case):
            sent = random_words(gpu, n_bytes, SENT)
            pipe.send(is_right(order, n_bytes // order.piece, sent, words))
            continue
        seen, end = 0, time.monotonic() + DEADLINE_S
        while seen < order:
            seen += len(agent.notes())
            if time.monotonic() > end:
                raise SystemExit(f"{seen} of {order} records arrived in {DEADLINE_S:g} s")
        pipe.send(seen)


def write_all(
    agent: NixlAgent, lists: int, case: Case, n: int, seed: int, pipe: Connection
) -> float:
    """Seconds from the first post to the arrival of the last record."""
    work = list(handles(case, n, seed))
    pipe.send(len(work))
    live: list[Handle] = []
    started = time.perf_counter()
    end = time.monotonic() + DEADLINE_S
    while work or live:
        while work and len(live) < IN_FLIGHT:
            source, target = work.pop()
            live.append(agent.write(lists, source, target, b"r" * 32))  # type: ignore[arg-type]
        live = [handle for handle in live if not agent.poll(handle)]
        if time.monotonic() > end:
            raise SystemExit(
                f"{len(work)} handles unposted, {len(live)} live after {DEADLINE_S:g} s"
            )
    if not pipe.poll(DEADLINE_S):
        raise SystemExit(f"the receiver did not see all records in {DEADLINE_S:g} s")
    pipe.recv()
    return time.perf_counter() - started


def is_right(case: Case, n: int, source: Tensor, target: Tensor) -> bool:
    """Whether every piece lies where the last round sent it."""
    words = case.piece // 8
    a, b = source[: n * words].view(n, words), target[: n * words].view(n, words)
    for indices in handles(case, n, WARM_UPS + ROUNDS - 1):
        from_, to = (torch.from_numpy(i).long().to(a.device) for i in indices)
        if not torch.equal(a[from_], b[to]):
            return False
    return True


def peer_copy_rate(n_bytes: int) -> float:
    """GB/s of `copy_` from GPU 0 to GPU 1."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(n_bytes, dtype=torch.uint8, device="cuda:1")
    spans: list[float] = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        spans.append(time.perf_counter() - started)
    return n_bytes / statistics.median(spans) / 1e9


def measure(n_bytes: int, gpus: tuple[int, int], *, is_batched: bool) -> list[Row]:
    """Every case, one after the other."""
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    process = context.Process(target=receive, args=(n_bytes, gpus[1], far), daemon=True)
    process.start()
    agent = NixlAgent("sender", is_batched=is_batched)
    _words, region = pool_of(gpus[0], n_bytes, SENT, agent)
    if not pipe.poll(DEADLINE_S):
        raise SystemExit(f"the receiver did not start in {DEADLINE_S:g} s")
    name, metadata, target = pipe.recv()
    agent.connect(name, metadata)
    rows: list[Row] = []
    for case in CASES:
        source_stripes, target_stripes = stripes(region, case.piece), stripes(target, case.piece)
        lists, n = agent.prepare(name, source_stripes, target_stripes), source_stripes.count
        seeds = range(WARM_UPS + ROUNDS)
        spans = [write_all(agent, lists, case, n, seed, pipe) for seed in seeds][WARM_UPS:]
        pipe.send(case)
        rate = n * case.piece / statistics.median(spans) / 1e9
        rows.append(Row(case, n, rate, pipe.recv(), is_batched))
        print(rows[-1].text(), flush=True)
    pipe.send(None)
    agent.disconnect(name)
    agent.close()
    process.join(DEADLINE_S)
    return rows


def main() -> None:
    """Measure, print, write; exit status 1 when bytes are wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=8.0, help="of each pool")
    parser.add_argument(
        "--gpus", default="0,1", help="sender and receiver; twice the same is allowed"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    first, second = map(int, arguments.gpus.split(","))
    if torch.cuda.device_count() <= max(first, second):
        raise SystemExit(f"torch sees {torch.cuda.device_count()} GPUs; --gpus {arguments.gpus}")
    n_bytes = int(arguments.gib * (1 << 30))
    plain = peer_copy_rate(n_bytes) if first != second else math.nan
    rows = [
        row for how in (True, False) for row in measure(n_bytes, (first, second), is_batched=how)
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    card = torch.cuda.get_device_name().lower().replace(" ", "-")
    stem = f"{datetime.now(UTC):%Y-%m-%d}-transfer-{card}"
    text = report(arguments.gpus, plain, rows, arguments.out / f"{stem}.png")
    (arguments.out / f"{stem}.md").write_text(text)
    print(text)
    raise SystemExit(0 if all(row.is_right for row in rows) else 1)


def report(gpus: str, plain: float, rows: list[Row], picture: Path) -> str:
    """Markdown, and a picture of the rates beside their bars. plain: GB/s of a copy, NaN when not measured."""
    settings = " ".join(
        f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(("UCX_", "NIXL_UCX_"))
    )
    batched, alone = ([r.rate for r in rows if r.is_batched == how] for how in (True, False))
    bar = [case.bar for case in CASES]
    series = {"one call a handle": batched, "one call a piece": alone, "bar": bar}
    line = None if math.isnan(plain) else plain
    shown = bars(picture, [case.name for case in CASES], series, "GB/s; line: a copy", line=line)
    copied = "not measured" if line is None else f"{plain:.0f} GB/s"
    return "\n".join(
        (
            f"# Transfers from GPU to GPU on {torch.cuda.get_device_name()}, {datetime.now(UTC):%Y-%m-%d}",
            "",
            f"nixl {NIXL_VERSION}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python "
            f"{platform.python_version()}, GPUs {gpus}, {settings or 'UCX by its own choice'}. "
            f"A plain copy between the two: {copied}.",
            "",
            f"    {shlex.join(['python', 'benchmarks/transfer.py', *sys.argv[1:]])}",
            "",
            "| what | calls of the driver a handle | pieces | bytes each | GB/s | bar | bytes right |",
            "|---|---|---|---|---|---|---|",
            *(row.text() for row in rows),
            "",
            shown,
            "",
        )
    )


if __name__ == "__main__":
    main()
