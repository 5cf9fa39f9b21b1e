"""`k3-bench eval`: the frozen suites over the REST endpoint: accuracy, self-ending, tokens/s, acceptance.

It asks the server at --url, or a cluster of its own with --local. An answer that fails counts as wrong and is listed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from k3.bench.accuracy import (
    SuiteFigures,
    acceptance_table,
    as_json,
    markdown,
    plot,
    row,
    summarize,
    table,
)
from k3.bench.answers import Answer, Asker
from k3.bench.suites import Item, choose, read
from k3.bench.target import add_arguments as add_target
from k3.bench.target import server
from k3.errors import ConfigError

VERSIONS = ("k3-serving", "torch", "nixl")
N_ERRORS_SHOWN = 10


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    p.add_argument(
        "--suite", default="all", help="all, arithmetic, recall, or names with commas between"
    )
    p.add_argument("--items", type=int, default=0, help="the first N of each suite; 0 = all")
    add_target(p)
    p.add_argument(
        "--part", default="1/1", help="K/N: every N-th item, from the K-th of each suite"
    )
    p.add_argument("--model", default="", help="model folder of a --local cluster")
    p.add_argument("--concurrency", type=int, default=4, help="most requests in flight")
    p.add_argument("--timeout-s", type=float, default=600.0, help="of one answer")
    p.add_argument("--json", type=Path, help="write figures and wrong answers there")
    p.add_argument("--markdown", type=Path, help="write the tables there, with machine and command")
    p.add_argument("--plot", type=Path, help="write a PNG of accuracy per suite there")


def run(args: argparse.Namespace, console: Console) -> int:
    """0 when every request was answered, right or wrong; else 1."""
    names = choose(args.suite)
    if args.items < 0 or args.concurrency < 1:
        raise ConfigError(
            f"--items {args.items} --concurrency {args.concurrency}: items must be at least 0 "
            "(0 = all), concurrency at least 1"
        )
    part(args.part)
    if args.model and not args.local:
        raise ConfigError(f"--model {args.model} names no model of a running server; add --local")
    flags = ("--model", args.model) if args.model else ()
    with server(args, console, flags) as url:
        figures, answers = asyncio.run(measure(url, names, args, console))
    show(figures, answers, console)
    return 1 if any(a.error for a in answers) else 0


async def measure(
    url: str, names: tuple[str, ...], args: argparse.Namespace, console: Console
) -> tuple[list[SuiteFigures], list[Answer]]:
    """All suites one after the other, a bar each. Files are written after every suite: a long run may be stopped."""
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[right]} right"),
        TimeElapsedColumn(),
    )
    figures: list[SuiteFigures] = []
    everything: list[Answer] = []
    limits = httpx.Limits(max_connections=args.concurrency)
    async with httpx.AsyncClient(
        base_url=url, timeout=args.timeout_s, limits=limits, headers=headers, trust_env=False
    ) as client:
        asker = await Asker.open(client, args.concurrency)
        with Progress(*columns, console=console) as progress:
            for name in names:
                begin = time.monotonic()
                items = read(name, args.items)[part(args.part)]
                answers = await ask_suite(asker, name, items, progress)
                figures.append(summarize(name, answers, time.monotonic() - begin))
                everything += answers
                if not console.is_terminal:  # bars are drawn on terminals only
                    console.print("  ".join(row(figures[-1])))
                save(figures, everything, facts(asker.model, args), args)
        return figures, everything


def part(text: str) -> slice:
    """The items of part K of N, so that several servers share a suite. ConfigError when it is none."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    number, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= count:
        raise ConfigError(f"--part {text}: expected K/N with K from 1 to N, for example 2/3")
    return slice(number - 1, None, count)


async def ask_suite(asker: Asker, name: str, items: list[Item], progress: Progress) -> list[Answer]:
    """One suite under its bar."""
    bar = progress.add_task(name, total=len(items), right=0)
    n_right = 0

    def advance(answer: Answer) -> None:
        nonlocal n_right
        n_right += answer.is_right is True
        progress.update(bar, advance=1, right=n_right)

    return await asker.suite(name, items, advance)


def facts(model: str, args: argparse.Namespace) -> dict[str, str]:
    """What has to stand beside the figures."""
    return {
        "model": model,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "versions": ", ".join(f"{name} {installed(name)}" for name in VERSIONS),
        "command": " ".join(["k3-bench", *sys.argv[1:]]),
        "in flight": str(args.concurrency),
    }


def save(
    figures: list[SuiteFigures],
    answers: list[Answer],
    about: dict[str, str],
    args: argparse.Namespace,
) -> None:
    """Write the files that were asked for."""
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(figures, answers, about), indent=2) + "\n")
    if args.markdown is not None:
        args.markdown.write_text(markdown(figures, about))
    if args.plot is not None:
        plot(figures, args.plot)


def show(figures: list[SuiteFigures], answers: list[Answer], console: Console) -> None:
    """Tables, then the first errors."""
    console.print(table(figures))
    console.print(acceptance_table(figures))
    failed = [a for a in answers if a.error]
    for answer in failed[:N_ERRORS_SHOWN]:
        console.print(f"{answer.item.id}: {answer.error}", markup=False)
    if len(failed) > N_ERRORS_SHOWN:
        console.print(f"... and {len(failed) - N_ERRORS_SHOWN} more; --json lists all")


def installed(name: str) -> str:
    """Version of a distribution here; a dash when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"
