"""`k3-bench spec`: what speculation is worth: the same questions without drafts, with them, and with a blind drafter.

Three clusters of their own, one after the other: plain decoding; drafts with the context handed over by prefill; drafts
whose drafter knows nothing of the prompt (prefill without it). Answers must be equal in all three: that is printed, and
decides the exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from k3.bench.answers import Answer, Asker
from k3.bench.speculation import Acceptance
from k3.bench.suites import choose, read
from k3.cluster import LocalCluster, Options
from k3.errors import ConfigError, K3Error

MODES = ("plain", "drafts", "blind")


@dataclass(frozen=True, slots=True)
class Figures:
    """One suite in one mode. length: tokens per step, None without drafts; is_equal: answers are plain decoding's."""

    suite: str
    mode: str
    n_items: int
    tokens_per_s: float
    length: float | None
    by_position: tuple[float, ...]
    is_equal: bool


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    p.add_argument(
        "--suite",
        default="arithmetic",
        help="all, arithmetic, recall, or names with commas between",
    )
    p.add_argument("--items", type=int, default=20, help="the first N of each suite; 0 = all")
    p.add_argument("--model", default="", help="model folder")
    p.add_argument("--drafter", default="draft-mla", help="drafter folder, also inside the model's")
    p.add_argument("--draft-tokens", type=int, default=7)
    p.add_argument("--draft-window", type=int, default=0, help="0 = the longest request")
    p.add_argument("--concurrency", type=int, default=1, help="most requests in flight")
    p.add_argument("--timeout-s", type=float, default=600.0, help="of one answer")
    p.add_argument("--json", type=Path, help="write the figures there")


def run(args: argparse.Namespace, console: Console) -> int:
    """0 when every answer came and is the same in all modes; else 1."""
    names = choose(args.suite)
    if args.items < 0 or args.concurrency < 1 or args.draft_tokens < 1:
        raise ConfigError(
            f"--items {args.items} --concurrency {args.concurrency} --draft-tokens {args.draft_tokens}: items must "
            "be at least 0 (0 = all), the others at least 1"
        )
    figures: list[Figures] = []
    truth: dict[str, list[str]] = {}
    for mode in MODES:
        console.print(f"{mode}: starting a local cluster")
        with LocalCluster(options(mode, args)) as cluster:
            for name in names:
                answers, seconds = asyncio.run(ask(cluster.url, name, args))
                texts = [answer.text for answer in answers]
                figures.append(
                    summarize(name, mode, answers, seconds, texts == truth.setdefault(name, texts))
                )
                if args.json:
                    args.json.write_text(json.dumps([asdict(f) for f in figures], indent=1) + "\n")
    show(figures, console)
    return 0 if all(f.is_equal for f in figures) else 1


def options(mode: str, args: argparse.Namespace) -> Options:
    """Flags of a mode's cluster."""
    model = ("--model", args.model) if args.model else ()
    own = ("--drafter", args.drafter)
    window = ("--spec-draft-window", str(args.draft_window)) if args.draft_window else ()
    speculate = (*own, "--draft-tokens", str(args.draft_tokens), *window)
    return Options(
        router_flags=model,
        prefill_flags=(*model, *(own if mode == "drafts" else ())),
        decode_flags=(*model, *(() if mode == "plain" else speculate)),
    )


async def ask(url: str, suite: str, args: argparse.Namespace) -> tuple[list[Answer], float]:
    """Answers of a suite and the seconds they took. K3Error when one is missing."""
    async with httpx.AsyncClient(base_url=url, timeout=args.timeout_s, trust_env=False) as client:
        asker = await Asker.open(client, args.concurrency)
        begin = time.monotonic()
        answers = await asker.suite(suite, read(suite, args.items))
        seconds = time.monotonic() - begin
    failed = [f"{answer.item.id}: {answer.error}" for answer in answers if answer.error]
    if failed:
        raise K3Error(f"{len(failed)} requests of {suite} failed: {failed[0]}")
    return answers, seconds


def summarize(
    suite: str, mode: str, answers: list[Answer], seconds: float, is_equal: bool
) -> Figures:
    """Figures of one suite."""
    total: Acceptance | None = None
    for answer in answers:
        if answer.acceptance is not None:
            total = answer.acceptance if total is None else total.plus(answer.acceptance)
    n_tokens = sum(answer.output_tokens for answer in answers)
    return Figures(
        suite,
        mode,
        len(answers),
        n_tokens / seconds,
        None if total is None else total.length,
        () if total is None else total.by_position,
        is_equal,
    )


def show(figures: list[Figures], console: Console) -> None:
    """The table."""
    plain = {f.suite: f.tokens_per_s for f in figures if f.mode == "plain"}
    table = Table("suite", "mode", "items", "tokens/s", "gain", "tokens/step", "answers")
    for f in sorted(figures, key=lambda f: f.suite):
        table.add_row(
            f.suite,
            f.mode,
            str(f.n_items),
            f"{f.tokens_per_s:.1f}",
            f"{f.tokens_per_s / plain[f.suite]:.2f}",
            "-" if f.length is None else f"{f.length:.2f}",
            "equal" if f.is_equal else "DIFFER",
        )
    console.print(table)
