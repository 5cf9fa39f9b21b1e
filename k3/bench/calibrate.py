"""`k3-bench calibrate`: measures what steps cost here and what a drafter's confidence is worth, for `spec.calibration`.

Two clusters, one after the other. The drafted one answers evaluation suites and tells how far it trusted each draft and
how many were accepted: one temperature per position makes the products of confidences come true. Then, with drafts and
without, steps of several batch sizes are timed: steps per second by the tokens a step checks, the drafter's own time
included, and those of plain decoding by rows, which say where drafts break even. Ask what will be asked: heads are
over-confident about what they were not trained on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from k3.bench.answers import Asker
from k3.bench.step import window
from k3.bench.suites import choose, read
from k3.calibration import Calibration, StepRates, calibrated, calibration_error, fit
from k3.cluster import LocalCluster, Options, get
from k3.config.resolve import EMBEDDED_MODEL, resolve_drafter
from k3.errors import ConfigError, K3Error
from k3.model.digest import model_digest

LEAST_SAMPLES = 100
GET_S = 30.0

Json = dict[str, Any]


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    p.add_argument("--output", type=Path, required=True, help="the calibration file to write")
    p.add_argument("--model", default="", help="model folder")
    p.add_argument("--drafter", default="draft-mla", help="drafter folder, also inside the model's")
    p.add_argument("--draft-tokens", type=int, default=7, help="drafts per step")
    p.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8], help="rows to time")
    p.add_argument("--suite", default="arithmetic", help="as of k3-bench spec")
    p.add_argument("--items", type=int, default=20, help="the first N of each suite; 0 = all")
    p.add_argument("--prompt-tokens", type=int, default=16, help="of the timed requests")
    p.add_argument("--output-tokens", type=int, default=96, help="of the timed requests")
    p.add_argument("--timeout-s", type=float, default=600.0, help="of one answer")


def run(args: argparse.Namespace, console: Console) -> int:
    """0 when the file is written. Raises K3Error when there is too little to go by."""
    if args.draft_tokens < 1 or min(args.batch) < 1:
        raise ConfigError(
            f"--draft-tokens {args.draft_tokens} --batch {args.batch}: each must be at least 1"
        )
    if not args.output.parent.is_dir():
        raise ConfigError(f"--output {args.output}: there is no folder {args.output.parent}")
    drafter = Path(resolve_drafter(args.drafter, args.model or str(EMBEDDED_MODEL)))
    digest = model_digest(drafter)
    console.print("with drafts: starting a local cluster")
    with LocalCluster(options(args, args.draft_tokens)) as cluster:
        asyncio.run(ask(cluster, args))
        told, accepted = observed(cluster)
        drafting = rates(timings(cluster, args, args.draft_tokens))
    console.print("without drafts: starting a local cluster")
    with LocalCluster(options(args, 0)) as cluster:
        plain = rates(timings(cluster, args, 0))
    found = Calibration(digest, fit(told, accepted), drafting, plain)
    args.output.write_text(json.dumps(found.document(), indent=1) + "\n")
    console.print(f"{len(told)} groups; temperatures {found.temperatures}")
    console.print(f"calibration error {errors(told, accepted, found.temperatures)}")
    for name, table in (("drafting", found.rates), ("plain", found.plain)):
        for tokens, per_s in zip(table.tokens, table.per_s, strict=True):
            console.print(f"{name}, {tokens:>6} tokens: {per_s:8.2f} steps/s")
    console.print(f"written to {args.output}; use it as spec.calibration")
    return 0


def options(args: argparse.Namespace, draft_tokens: int) -> Options:
    """Flags of a cluster that drafts `draft_tokens`, or not at all."""
    model = ("--model", args.model) if args.model else ()
    rows = ("--max-rows", str(max(args.batch)))
    own = ("--drafter", args.drafter) if draft_tokens else ()
    drafts = ("--draft-tokens", str(draft_tokens))
    observe = ("--spec-draft-schedule", "observe") if draft_tokens else ()
    return Options(
        router_flags=model,
        prefill_flags=(*model, *rows, *own),
        decode_flags=(*model, *rows, *own, *drafts, *observe),
    )


def timings(
    cluster: LocalCluster, args: argparse.Namespace, draft_tokens: int
) -> list[tuple[int, float]]:
    """Tokens of a step and steps per second, by batch size."""
    found: list[tuple[int, float]] = []
    for batch in args.batch:
        split = asyncio.run(window(cluster, 1, batch, args))
        found.append((batch * (1 + draft_tokens), 1 / split.wall_s))
    return found


async def ask(cluster: LocalCluster, args: argparse.Namespace) -> None:
    """All suites. Raises K3Error when an answer is missing."""
    in_flight = max(args.batch)
    limits = httpx.Limits(max_connections=in_flight)
    async with httpx.AsyncClient(
        base_url=cluster.url, timeout=args.timeout_s, limits=limits, trust_env=False
    ) as client:
        asker = await Asker.open(client, in_flight)
        for name in choose(args.suite):
            answers = await asker.suite(name, read(name, args.items))
            failed = [f"{a.item.id}: {a.error}" for a in answers if a.error]
            if failed:
                raise K3Error(f"{len(failed)} requests of {name} failed: {failed[0]}")


def observed(cluster: LocalCluster) -> tuple[list[list[float]], list[int]]:
    """Confidences of groups and how many of their drafts were accepted."""
    page = get(cluster.decodes[0].ops, "/admin/drafts", GET_S)
    if page.status != 200:
        raise K3Error(f"/admin/drafts of decode answers {page.status}: {page.body[:200]}")
    samples: list[Json] = json.loads(page.body)["samples"]
    if len(samples) < LEAST_SAMPLES:
        raise K3Error(
            f"{len(samples)} groups observed; at least {LEAST_SAMPLES} are needed: raise --items"
        )
    return [s["confidence"] for s in samples], [s["accepted"] for s in samples]


def rates(timed: Sequence[tuple[int, float]]) -> StepRates:
    """Ascending sizes; of two measurements of one size the slower one, and no size faster than a smaller one."""
    slowest: dict[int, float] = {}
    for tokens, per_s in timed:
        slowest[tokens] = min(per_s, slowest.get(tokens, per_s))
    sizes = sorted(slowest)
    return StepRates(tuple(sizes), tuple(accumulate((slowest[n] for n in sizes), min)))


def errors(
    told: Sequence[Sequence[float]], accepted: Sequence[int], temperatures: Sequence[float]
) -> str:
    """Of the first draft, before and after."""
    came = [n > 0 for n in accepted]
    raw = calibration_error([row[0] for row in told], came)
    scaled = calibration_error([calibrated(row, temperatures)[0] for row in told], came)
    return f"of the first draft: {raw:.3f} as told, {scaled:.3f} calibrated"
