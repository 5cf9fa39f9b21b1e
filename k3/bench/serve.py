"""`k3-bench serve`: drive the REST endpoint and report latency, throughput, goodput and errors."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from k3.bench.load import Arrivals, Record, drive
from k3.bench.prompts import ChatWorkload, RandomWorkload, Workload
from k3.bench.report import Slo, plot, summarize, table
from k3.bench.target import add_arguments as add_target
from k3.bench.target import server
from k3.errors import ConfigError, K3Error


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    add_target(p)
    p.add_argument("--requests", type=int, default=64, help="requests in all")
    p.add_argument("--concurrency", type=int, default=8, help="most requests in flight")
    p.add_argument("--rate", type=float, default=0.0, help="arrivals per second; 0 = closed loop")
    p.add_argument(
        "--workload", choices=("chat", "random"), default="chat", help="questions, or random tokens"
    )
    p.add_argument("--prompt-tokens", type=int, default=128, help="random workload only")
    p.add_argument("--output-tokens", type=int, default=128, help="limit (chat) or exact (random)")
    p.add_argument("--seed", type=int, default=0, help="of workload and arrivals")
    p.add_argument("--slo-ttft-ms", type=float, default=1000.0, help="goodput: first token within")
    p.add_argument("--slo-tpot-ms", type=float, default=100.0, help="goodput: mean time per token")
    p.add_argument("--timeout-s", type=float, default=300.0, help="of one read")
    p.add_argument("--json", type=Path, help="write the figures there")
    p.add_argument("--plot", type=Path, help="write a PNG there")


def workload(args: argparse.Namespace, url: str) -> Workload:
    """The requests to send; the random one asks the server for its vocabulary."""
    if args.workload == "chat":
        return ChatWorkload(args.output_tokens, args.seed)
    info = httpx.get(f"{url}/tokenizer_info", timeout=10.0, trust_env=False)
    if info.status_code != 200:
        raise K3Error(f"GET {url}/tokenizer_info: HTTP {info.status_code}; is it a k3-router?")
    return RandomWorkload(
        args.prompt_tokens, args.output_tokens, int(info.json()["vocab_size"]), args.seed
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """0 when every request is complete, else 1."""
    if min(args.requests, args.concurrency, args.output_tokens) < 1:
        raise ConfigError(
            f"--requests {args.requests} --concurrency {args.concurrency} --output-tokens {args.output_tokens}: "
            "each must be at least 1"
        )
    with server(args, console) as url:
        records = measure(url, workload(args, url), args, console)
    report = summarize(records, Slo(args.slo_ttft_ms / 1e3, args.slo_tpot_ms / 1e3))
    console.print(table(report))
    if args.json is not None:
        args.json.write_text(json.dumps(report.as_json(settings(args)), indent=2) + "\n")
    if args.plot is not None:
        plot(records, args.plot)
    return 0 if report.n_complete == report.n_requests else 1


def measure(url: str, work: Workload, args: argparse.Namespace, console: Console) -> list[Record]:
    """Drive the server under a progress bar."""
    arrivals = Arrivals(args.requests, args.concurrency, args.rate, args.seed)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("requests", total=args.requests)
        return asyncio.run(
            drive(
                url,
                work,
                arrivals,
                timeout_s=args.timeout_s,
                api_key=args.api_key,
                on_done=lambda _: progress.advance(bar),
            )
        )


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, without secrets and file names."""
    hidden = {"api_key", "json", "plot", "command", "run"}
    return {k: v for k, v in vars(args).items() if k not in hidden}
