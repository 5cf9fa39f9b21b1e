"""The services as they are deployed, on GPUs: layouts one after the other under the same load.

    python benchmarks/serve.py --layout 1p1d,cp2 [--requests 64] [--drafter draft-mla] [--out benchmarks/results]

`alone`: a decode service with `--role both` on GPU 0, which computes prompts itself. `both`: prefill and decode as
processes on GPU 0. `1p1d`: prefill on GPU 0, decode on GPU 1. `cp2`: decode's latent
cache over two ranks, on GPUs 0 and 1, with prefill beside the first. Every layout answers recorded samples of the
embedded model over REST first, which must be the recorded answers, and then the load of `k3-bench serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import torch
from harness import bars, device_name

from k3.bench.load import Arrivals, drive
from k3.bench.prompts import ChatWorkload
from k3.bench.report import Report, Slo, summarize
from k3.cluster import LocalCluster, Options
from k3.config.resolve import EMBEDDED_MODEL

HERE = Path(__file__).parent
READY_S = 180.0
MAX_LEN = 4096  # tokens; where pages and everything else share one instance's memory
SAMPLES = json.loads((EMBEDDED_MODEL / "samples.json").read_text())


@dataclass(frozen=True, slots=True)
class Layout:
    """GPUs of each service, as CUDA_VISIBLE_DEVICES, and decode's context ranks. prefill: none without one."""

    prefill: str
    decode: str
    cp: int = 1


LAYOUTS: Mapping[str, Layout] = {
    "alone": Layout("", "0"),
    "both": Layout("0", "0"),
    "1p1d": Layout("0", "1"),
    "cp2": Layout("0", "0,1", cp=2),
}


@dataclass(frozen=True, slots=True)
class Served:
    """What one layout did."""

    layout: str
    start_s: float
    n_right: int
    n_asked: int
    single: float  # tokens per second of one request at a time
    loaded: Report


def cluster(layout: Layout, arguments: argparse.Namespace) -> LocalCluster:
    """Router, at most one prefill and one decode service; each sees its own GPUs."""
    device = ("--model-device", arguments.device)
    drafter = ("--drafter", arguments.drafter) if arguments.drafter else ()
    drafting = (*drafter, "--draft-tokens", "7") if drafter else ()
    rows = ("--max-rows", str(arguments.concurrency))
    alone = ("--role", "both", "--model-max-model-len", str(MAX_LEN))
    role = ("--cp", str(layout.cp)) if layout.prefill else alone
    options = Options(
        n_prefills=1 if layout.prefill else 0,
        prefill_flags=(*device, *drafter, *rows),
        decode_flags=(*device, *drafting, *rows, *role),
    )
    running = LocalCluster(options)
    for members, gpus in ((running.prefills, layout.prefill), (running.decodes, layout.decode)):
        for member in members:
            member.env = {"CUDA_VISIBLE_DEVICES": gpus}
    return running


def right_answers(url: str, n: int) -> tuple[int, float]:
    """How many of the first `n` samples are answered as recorded, and tokens per second one at a time."""
    n_right, n_tokens, spent = 0, 0, 0.0
    with httpx.Client(timeout=60.0, trust_env=False) as client:
        for sample in SAMPLES[:n]:
            asked = {
                "prompt": sample["prompt_ids"],
                "max_tokens": len(sample["answer_ids"]),
                "temperature": 0,
                "ignore_eos": True,
                "skip_special_tokens": False,
                "return_token_ids": True,
            }
            started = time.perf_counter()
            answer = client.post(f"{url}/v1/completions", json=asked)
            spent += time.perf_counter() - started
            answer.raise_for_status()
            choice = answer.json()["choices"][0]
            n_right += choice["token_ids"] == sample["answer_ids"]
            n_tokens += len(choice["token_ids"])
    return n_right, n_tokens / spent


def serve(name: str, arguments: argparse.Namespace) -> Served:
    """One layout from start to stop. Raises K3Error when a member fails."""
    running = cluster(LAYOUTS[name], arguments)
    started = time.perf_counter()
    running.start(READY_S)
    try:
        start_s = time.perf_counter() - started
        right_answers(running.url, 1)
        n_right, single = right_answers(running.url, arguments.samples)
        load = Arrivals(arguments.requests, arguments.concurrency, 0.0, 0)
        work = ChatWorkload(arguments.output_tokens, seed=0)
        records = asyncio.run(drive(running.url, work, load, timeout_s=120.0))
        loaded = summarize(records, Slo(1.0, 0.1))
    finally:
        running.stop()
    return Served(name, start_s, n_right, arguments.samples, single, loaded)


def plot(served: list[Served], path: Path) -> str:
    """Tokens per second of every layout; returns Markdown that shows it."""
    series = {
        "one request at a time": [s.single for s in served],
        "under load": [s.loaded.output_tokens_per_s for s in served],
    }
    return bars(path, [s.layout for s in served], series, "tokens/s")


def main() -> None:
    """Measure, print, write; exit status 1 when an answer was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layout", default="1p1d,cp2", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--drafter", default="draft-mla", help="empty = no speculation")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    served: list[Served] = []
    for name in arguments.layout.split(","):
        served.append(serve(name, arguments))
        print(served[-1], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = device_name(arguments.device)
    stem = f"{datetime.now(UTC):%Y-%m-%d}-serve-{machine.lower().replace(' ', '-')}"
    text = "\n".join(
        (
            f"# Services on {machine}, {datetime.now(UTC):%Y-%m-%d}",
            "",
            f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, embedded model, "
            f"drafter {arguments.drafter or 'none'}.",
            "",
            f"    {shlex.join(['python', 'benchmarks/serve.py', *sys.argv[1:]])}",
            "",
            f"Load: {arguments.requests} chat requests, {arguments.concurrency} at a time.",
            "",
            "| layout | start s | right answers | tokens/s, one request | complete | tokens/s, load | TTFT ms p50 "
            "| TPOT ms p50 |",
            "|---|---|---|---|---|---|---|---|",
            *map(_row, served),
            "",
            plot(served, arguments.out / f"{stem}.png"),
            "",
        )
    )
    (arguments.out / f"{stem}.md").write_text(text)
    print(text)
    raise SystemExit(1 if any(s.n_right < s.n_asked for s in served) else 0)


def _row(s: Served) -> str:
    load = s.loaded
    return (
        f"| {s.layout} | {s.start_s:.1f} | {s.n_right} of {s.n_asked} | {s.single:.0f} | "
        f"{load.n_complete} of {load.n_requests} | {load.output_tokens_per_s:.0f} | {1e3 * load.ttft_s.p50:.0f} | "
        f"{1e3 * load.tpot_s.p50:.2f} |"
    )


if __name__ == "__main__":
    main()
