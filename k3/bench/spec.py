"""`k3-bench spec`: what speculation is worth: the same questions without drafts, with them, and with a blind drafter.

A cluster of its own for each mode, one after the other: plain decoding; drafts with the context handed over by prefill;
drafts whose drafter knows nothing of the prompt (prefill without it). `--compare` adds one process that prefills and
decodes by itself, so that nothing is handed over, and the cost of a step's parts. Answers must be equal in all modes:
that is printed, and decides the exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from k3.bench.alone import answer_alone
from k3.bench.answers import Answer, Asker, Exchange
from k3.bench.eval import facts
from k3.bench.spec_report import (
    COSTS,
    FIGURES,
    PLAIN,
    POSITIONS,
    Cost,
    Figures,
    as_json,
    cost_rows,
    figure_rows,
    markdown,
    plot,
    position_rows,
    table,
)
from k3.bench.speculation import Acceptance
from k3.bench.step import Reading
from k3.bench.step import read as read_steps
from k3.bench.suites import choose, read
from k3.cluster import LocalCluster, Options
from k3.config.resolve import EMBEDDED_MODEL, resolve_drafter
from k3.errors import ConfigError, K3Error
from k3.model.digest import model_digest

MODES = (PLAIN, "drafts", "blind")
ONE_PROCESS = "one process"
PRESET = "tiny-demo"

Key = tuple[str, int]  # suite, requests in flight


@dataclass(slots=True)
class Measured:
    """What is known so far. exchanges: of plain decoding, the truth of all modes."""

    figures: list[Figures] = field(default_factory=list[Figures])
    costs: list[Cost] = field(default_factory=list[Cost])
    exchanges: dict[Key, list[Exchange]] = field(default_factory=dict[Key, list[Exchange]])
    model: str = ""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    p.add_argument(
        "--suite",
        default="arithmetic",
        help="all, arithmetic, recall, or names with commas between",
    )
    p.add_argument("--items", type=int, default=20, help="the first N of each suite; 0 = all")
    p.add_argument("--compare", action="store_true", help="also one process without a hand-over")
    p.add_argument("--model", default="", help="model folder")
    p.add_argument("--drafter", default="draft-mla", help="drafter folder, also inside the model's")
    p.add_argument("--draft-tokens", type=int, default=7, help="drafts per step")
    p.add_argument("--draft-window", type=int, default=0, help="tokens it reads; 0 = all")
    p.add_argument(
        "--concurrency", type=int, nargs="+", default=[1], help="most requests in flight"
    )
    p.add_argument("--timeout-s", type=float, default=600.0, help="of one answer")
    p.add_argument("--json", type=Path, help="write the figures there")
    p.add_argument("--markdown", type=Path, help="write the tables there, with machine and command")
    p.add_argument("--plot", type=Path, help="write a PNG of gains and tokens per step there")


def run(args: argparse.Namespace, console: Console) -> int:
    """0 when every answer came and is the same in all modes; else 1."""
    names = choose(args.suite)
    if args.items < 0 or min(args.concurrency) < 1 or args.draft_tokens < 1:
        raise ConfigError(
            f"--items {args.items} --concurrency {args.concurrency} --draft-tokens {args.draft_tokens}: items must "
            "be at least 0 (0 = all), the others at least 1"
        )
    model_digest(Path(resolve_drafter(args.drafter, args.model or str(EMBEDDED_MODEL))))
    found, load = Measured(), os.getloadavg()[0]
    for mode in MODES:
        console.print(f"{mode}: starting a local cluster")
        with LocalCluster(options(mode, args)) as cluster:
            for in_flight in args.concurrency:
                asyncio.run(measure(cluster, mode, in_flight, names, args, console, found))
                save(found, args, load)
    if args.compare:
        console.print(f"{ONE_PROCESS}: answering the same prompts")
        for in_flight in args.concurrency:
            measure_alone(in_flight, names, args, found)
            save(found, args, load)
    console.print(table("what drafts are worth", FIGURES, figure_rows(found.figures)))
    console.print(table("drafts by position", POSITIONS, position_rows(found.figures)))
    console.print(table("one decode step", COSTS, cost_rows(found.costs)))
    return 1 if any(f.n_different for f in found.figures) else 0


def options(mode: str, args: argparse.Namespace) -> Options:
    """Flags of a mode's cluster."""
    model = ("--model", args.model) if args.model else ()
    own = ("--drafter", args.drafter)
    rows = ("--max-rows", str(max(args.concurrency))) if max(args.concurrency) > 8 else ()
    return Options(
        router_flags=model,
        prefill_flags=(*model, *(own if mode == "drafts" else ())),
        decode_flags=(*model, *rows, *(() if mode == PLAIN else speculation(args))),
        preset=PRESET,
    )


def speculation(args: argparse.Namespace) -> tuple[str, ...]:
    """Flags of a decode that drafts."""
    window = ("--spec-draft-window", str(args.draft_window)) if args.draft_window else ()
    return ("--drafter", args.drafter, "--draft-tokens", str(args.draft_tokens), *window)


async def measure(
    cluster: LocalCluster,
    mode: str,
    in_flight: int,
    names: Sequence[str],
    args: argparse.Namespace,
    console: Console,
    found: Measured,
) -> None:
    """All suites of one mode, a bar each. K3Error when an answer is missing."""
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn())
    limits = httpx.Limits(max_connections=in_flight)
    ops = cluster.decodes[0].ops
    before = await asyncio.to_thread(read_steps, ops)
    async with httpx.AsyncClient(
        base_url=cluster.url, timeout=args.timeout_s, limits=limits, trust_env=False
    ) as client:
        asker = await Asker.open(client, in_flight, keeps_ids=True)
        found.model = asker.model
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            for name in names:
                items = read(name, args.items)
                bar = progress.add_task(f"{name}, {mode}, {in_flight} in flight", total=len(items))
                begin = time.monotonic()
                answers = await asker.suite(
                    name, items, lambda _answer, bar=bar: progress.update(bar, advance=1)
                )
                found.figures.append(
                    summarize(name, mode, in_flight, answers, time.monotonic() - begin, found)
                )
    steps = (await asyncio.to_thread(read_steps, ops)).since(before)
    found.costs.append(cost(mode, in_flight, steps))


def summarize(
    suite: str,
    mode: str,
    in_flight: int,
    answers: Sequence[Answer],
    seconds: float,
    found: Measured,
) -> Figures:
    """Figures of one suite; the answers of plain decoding become the truth. K3Error when one is missing."""
    failed = [f"{answer.item.id}: {answer.error}" for answer in answers if answer.error]
    if failed:
        raise K3Error(f"{len(failed)} requests of {suite} failed: {failed[0]}")
    total: Acceptance | None = None
    for answer in answers:
        if answer.acceptance is not None:
            total = answer.acceptance if total is None else total.plus(answer.acceptance)
    exchanges = [x for answer in answers for x in answer.exchanges]
    truth = found.exchanges.setdefault((suite, in_flight), exchanges)
    n_tokens = sum(answer.output_tokens for answer in answers)
    n_different = differences([x.ids for x in exchanges], [x.ids for x in truth])
    return Figures(
        suite,
        mode,
        in_flight,
        len(answers),
        n_tokens,
        seconds,
        total,
        n_different,
        sum(answer.decode_tokens for answer in answers),
        sum(answer.decode_s for answer in answers),
    )


def differences(ids: Sequence[Sequence[int]], truth: Sequence[Sequence[int]]) -> int:
    """Answers that are not the same tokens; one that is missing is different."""
    unequal = sum(list(a) != list(b) for a, b in zip(ids, truth, strict=False))
    return unequal + abs(len(ids) - len(truth))


def measure_alone(
    in_flight: int, names: Sequence[str], args: argparse.Namespace, found: Measured
) -> None:
    """The exchanges of plain decoding again, in one process with drafts."""
    model = ("--model", args.model) if args.model else ()
    flags = ("--preset", PRESET, *model, *speculation(args))
    steps = Reading(0, 0, 0, 0, 0)
    for name in names:
        exchanges = found.exchanges[name, in_flight]
        alone = answer_alone(exchanges, flags, in_flight, args.timeout_s * len(exchanges))
        steps = steps.plus(Reading(0, 0, alone.n_steps, alone.step_s, alone.forward_s))
        found.figures.append(
            Figures(
                name,
                ONE_PROCESS,
                in_flight,
                len(exchanges),
                sum(map(len, alone.ids)),
                alone.seconds,
                alone.acceptance,
                differences(alone.ids, [x.ids for x in exchanges]),
            )
        )
    found.costs.append(cost(ONE_PROCESS, in_flight, steps))


def cost(mode: str, in_flight: int, steps: Reading) -> Cost:
    """What the steps of a mode cost."""
    return Cost(mode, in_flight, int(steps.n_steps), steps.step_s, steps.forward_s)


def save(found: Measured, args: argparse.Namespace, load: float) -> None:
    """Write the files that were asked for; after every mode, since a long run may be stopped."""
    about = facts(found.model, args)
    about["load average"] = f"{load:.1f} before, {os.getloadavg()[0]:.1f} after"
    if args.json is not None:
        tree = as_json(found.figures, found.costs, about)
        args.json.write_text(json.dumps(tree, indent=1) + "\n")
    if args.markdown is not None:
        args.markdown.write_text(markdown(found.figures, found.costs, about))
    if args.plot is not None and any(f.mode != PLAIN for f in found.figures):
        plot(found.figures, args.plot)
