"""Part `answers` of validate.py: the frozen suites by the services, decode cp N with drafts against cp 1 without.

Every mode is a cluster of its own (router, prefill, decode), all of them at once, since no time is measured here. The
same items go to each; the answers of cp 1 without drafts are the truth the others' tokens are compared with.
Acceptance is compared with cp 1 with drafts. Wrong configurations must be refused with exit status 2.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from serve import READY_S, Layout

from k3.bench.accuracy import summarize
from k3.bench.answers import Answer, Asker
from k3.bench.suites import choose, read
from k3.cluster import LocalCluster, Member, Options, get
from k3.errors import K3Error

Say = Callable[[str], None]
EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
DRAFTS = 7
ANSWER_S = 120.0
ACCURACY_LIMIT, ACCEPTANCE_LIMIT = 0.01, 0.01
REFUSED = (  # words after `k3-decode --check`
    ("--config", str(EXAMPLES / "helix-refused.yaml")),
    ("--config", str(EXAMPLES / "bad.yaml")),
    ("--preset", "tiny-demo", "--cp", "3"),
    ("--preset", "tiny-demo", "--cp", "2", "--pp", "2"),
    ("--preset", "tiny-demo", "--cp", "2", "--role", "both"),
    ("--preset", "tiny-demo", "--cp", "2", "--page-tokens", "48"),
    ("--preset", "tiny-demo", "--draft-tokens", "7"),
    ("--preset", "tiny-demo", "--cp", "2", "--backends-graphs", "on", "--model-device", "cpu"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked of whom. more: flags of every engine."""

    device: str
    n_devices: int
    suites: str
    n_items: int
    concurrency: int
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mode:
    """A cluster. layout: GPUs of both services; prefill has a stage on each of its GPUs."""

    layout: Layout
    n_drafts: int

    @property
    def name(self) -> str:
        """As in the table."""
        return f"cp {self.layout.cp}, {f'{self.n_drafts} drafts' if self.n_drafts else 'no drafts'}"

    @property
    def n_stages(self) -> int:
        """Of prefill."""
        return self.layout.prefill.count(",") + 1


@dataclass(slots=True)
class Suite:
    """Figures of one suite in one mode. equal: answers whose tokens are all those of the truth.

    n_agreed: tokens before the first difference, of n_compared of the truth.
    """

    n: int
    n_right: int
    n_tokens: int
    n_exchanges: int
    equal: int
    n_agreed: int
    n_compared: int
    histogram: list[int] = field(default_factory=list[int])


def modes(n_devices: int) -> list[Mode]:
    """The truth first, then drafts alone, then every cp that fits; prefill shares GPUs where none is left for it."""
    last = str(n_devices - 1)
    found = [Mode(Layout("0", last), 0), Mode(Layout("0", last), DRAFTS)]
    for cp in (2, 4, 8):
        if cp > n_devices:
            break
        first = cp if cp + 2 <= n_devices else 0
        decode = ",".join(map(str, range(cp)))
        found.append(Mode(Layout(f"{first},{first + 1}", decode, cp), DRAFTS))
    return found


def measure(settings: Settings, end: float, say: Say, keep: Callable[[Any], None]) -> None:
    """All modes at once; `keep` gets the part's tree when all are done. K3Error when a cluster or an answer fails."""
    refusals = [_refusal(words, say) for words in REFUSED]
    wanted = modes(settings.n_devices)
    clusters = [(mode, *_cluster(mode, settings)) for mode in wanted]
    with ThreadPoolExecutor(len(clusters)) as threads:
        asked = [threads.submit(_ask, *cluster, settings, end, say) for cluster in clusters]
        found = [task.result() for task in asked]
    truth = found[0][0]
    tree = {
        "refusals": refusals,
        "settings": asdict(settings),
        "modes": [
            {
                "name": mode.name,
                "prefill": mode.layout.prefill,
                "decode": mode.layout.decode,
                "graphs": chosen,
                "transfer": tail,
                "suites": {
                    s: asdict(_figures(s, answers[s], truth[s])) for s in truth if s in answers
                },
            }
            for mode, (answers, chosen, tail) in zip(wanted, found, strict=True)
        ],
    }
    keep(tree)


def _refusal(words: Sequence[str], say: Say) -> dict[str, Any]:
    """How a wrong configuration is taken."""
    command = [sys.executable, "-m", "decode_svc", "--check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    shown = " ".join(Path(w).name if w.endswith(".yaml") else w for w in words)
    n_remedies = (done.stdout + done.stderr).count("remedy:")
    say(f"answers: k3-decode --check {shown}: {n_remedies} refusals, status {done.returncode}")
    return {"words": shown, "status": done.returncode, "n": n_remedies}


def _cluster(mode: Mode, settings: Settings) -> tuple[LocalCluster, list[str]]:
    """Not started yet, and the lines its members will write."""
    device = ("--model-device", settings.device)
    rows = ("--max-rows", str(settings.concurrency))
    memory = ("--cache-memory-bytes", "2GiB" if settings.device == "cuda" else "256MiB")
    both = (*device, *rows, *memory, *settings.more)
    own = ("--drafter", "draft-mla") if mode.n_drafts else ()
    options = Options(
        prefill_flags=(*both, *own, "--pp", str(mode.n_stages)),
        decode_flags=(
            *(*both, *own, "--cp", str(mode.layout.cp)),
            *("--draft-tokens", str(mode.n_drafts), "--depth", "2"),
        ),
    )
    lines: list[str] = []
    cluster = LocalCluster(options, on_line=lambda _name, line: lines.append(line))
    for members, gpus in (
        (cluster.prefills, mode.layout.prefill),
        (cluster.decodes, mode.layout.decode),
    ):
        for member in members:
            member.env = {"CUDA_VISIBLE_DEVICES": gpus}
    return cluster, lines


def _ask(
    mode: Mode,
    cluster: LocalCluster,
    lines: list[str],
    settings: Settings,
    end: float,
    say: Say,
) -> tuple[dict[str, list[Answer]], str, dict[str, float]]:
    """Answers by suite, what decode says of its graphs, and its transfers. The thread owns the cluster's processes."""
    cluster.start(min(READY_S, end - time.monotonic()))
    try:
        say(f"answers: {mode.name}: ready")
        found = asyncio.run(_suites(mode, cluster.url, settings, end, say))
        tail = _transfers(cluster.decodes[0])
    finally:
        cluster.stop(grace_s=5.0)
    recorded = [line.split(": ")[-1] for line in lines if "steps recorded" in line]
    return found, recorded[0] if recorded else "none", tail


async def _suites(
    mode: Mode, url: str, settings: Settings, end: float, say: Say
) -> dict[str, list[Answer]]:
    """One suite after the other, as many as the time allows."""
    limits = httpx.Limits(max_connections=settings.concurrency)
    found: dict[str, list[Answer]] = {}
    async with httpx.AsyncClient(
        base_url=url, timeout=ANSWER_S, limits=limits, trust_env=False
    ) as client:
        asker = await Asker.open(client, settings.concurrency, keeps_ids=True)
        for name in choose(settings.suites):
            started = time.monotonic()
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + end - started):
                    answers = await asker.suite(name, read(name, settings.n_items))
            except TimeoutError:
                say(f"answers: {mode.name}: the time is over in {name}")
                break
            failed = [f"{a.item.id}: {a.error}" for a in answers if a.error]
            if failed:
                raise K3Error(f"{mode.name}: {len(failed)} of {name} failed: {failed[0]}")
            found[name] = answers
            figures = summarize(name, answers, time.monotonic() - started)
            say(
                f"answers: {mode.name}: {name}: {figures.n_right} of {figures.n} right, "
                f"{figures.output_tokens_per_s:.0f} tokens/s"
            )
    return found


def _transfers(decode: Member) -> dict[str, float]:
    """Transfers a decode instance took, and seconds from first tokens until caches were complete, in all."""
    values: dict[str, float] = {}
    for line in get(decode.ops, "/metrics").body.splitlines():
        name, _, value = line.partition(" ")
        if name in ("k3_transfer_seconds_sum", "k3_transfer_seconds_count"):
            values[name.rsplit("_", 1)[1]] = float(value)
    return values


def _figures(suite: str, answers: Sequence[Answer], truth: Sequence[Answer]) -> Suite:
    """One suite of one mode beside the truth."""
    figures = summarize(suite, answers, 1.0)
    ours = [x.ids for a in answers for x in a.exchanges]
    theirs = [x.ids for a in truth for x in a.exchanges]
    return Suite(
        n=figures.n,
        n_right=figures.n_right,
        n_tokens=figures.output_tokens,
        n_exchanges=len(theirs),
        equal=sum(a == b for a, b in zip(ours, theirs, strict=False)),
        n_agreed=sum(agreed(a, b) for a, b in zip(ours, theirs, strict=False)),
        n_compared=sum(map(len, theirs)),
        histogram=list(figures.acceptance.histogram) if figures.acceptance else [],
    )


def agreed(ids: Sequence[int], truth: Sequence[int]) -> int:
    """Tokens before the first difference."""
    pairs = enumerate(zip(ids, truth, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ids), len(truth)))


def total(suites: dict[str, dict[str, Any]]) -> Suite:
    """All suites together; unscored ones count in tokens alone."""
    rows = [Suite(**suite) for suite in suites.values()]
    histograms = [row.histogram for row in rows if row.histogram]
    added = {name: sum(getattr(row, name) for row in rows) for name in COUNTS}
    return Suite(**added, histogram=[sum(column) for column in zip(*histograms, strict=True)])


COUNTS = ("n", "n_right", "n_tokens", "n_exchanges", "equal", "n_agreed", "n_compared")
UNSCORED = "open"


def acceptance(suite: Suite) -> float:
    """Tokens per verify step; 0 without drafts."""
    steps = sum(suite.histogram)
    return 1 + sum(j * n for j, n in enumerate(suite.histogram)) / steps if steps else 0.0


def lines(part: dict[str, Any]) -> list[str]:
    """Markdown."""
    asked = part["settings"]
    out = [
        f"{asked['n_items'] or 'All'} items of each suite, {asked['concurrency']} requests at a time, flags of every "
        f"engine: {' '.join(asked['more']) or 'none'}. Prefill has a stage on each of its GPUs, decode a rank on each "
        "of its own; where both name a GPU they share it. Two steps in flight. Equal: the same tokens as cp 1 without "
        f"drafts. Tokens per step: without `{UNSCORED}`, whose texts are sampled.",
        "",
        "| decode | prefill GPUs | decode GPUs | right | equal answers | tokens before a difference | tokens per step "
        "| steps recorded |",
        "|---|---|---|--:|--:|--:|--:|---|",
    ]
    for mode in part["modes"]:
        scored, every = total(_scored(mode)), total(mode["suites"])
        out.append(
            f"| {mode['name']} | {mode['prefill']} | {mode['decode']} | {scored.n_right} of {scored.n} | "
            f"{every.equal} of {every.n_exchanges} | {every.n_agreed / max(1, every.n_compared):.2%} | "
            f"{acceptance(scored):.3f} | {mode['graphs'].split(',')[0]} |"
        )
    return [*out, "", *_suite_table(part["modes"]), "", *_refusal_lines(part["refusals"])]


def _suite_table(found: Sequence[dict[str, Any]]) -> list[str]:
    names = [mode["name"] for mode in found]
    out = [
        f"| suite | {' | '.join(f'{name}: right, equal, per step' for name in names)} |",
        f"|---|{'--:|' * len(names)}",
    ]
    for suite in found[0]["suites"]:
        cells = [_cell(Suite(**m["suites"][suite])) if suite in m["suites"] else "" for m in found]
        out.append(f"| {suite} | {' | '.join(cells)} |")
    return out


def _cell(s: Suite) -> str:
    return f"{s.n_right}/{s.n}, {s.equal}/{s.n_exchanges}, {acceptance(s):.2f}"


def _refusal_lines(refusals: Sequence[dict[str, Any]]) -> list[str]:
    out = ["| `k3-decode --check` | refusals, each with a remedy | exit status |", "|---|--:|--:|"]
    return [*out, *(f"| {r['words']} | {r['n']} | {r['status']} |" for r in refusals)]


def problems(part: dict[str, Any]) -> list[str]:
    """What is not as it must be: a refusal that did not come, answers or acceptance away from those of cp 1."""
    out = [f"not refused: {r['words']}" for r in part["refusals"] if r["status"] != 2 or not r["n"]]
    plain, drafting, *spread = part["modes"]
    right = _share(plain)
    usual = acceptance(total(_scored(drafting)))
    for mode in (drafting, *spread):
        if abs(_share(mode) - right) > ACCURACY_LIMIT:
            out.append(f"{mode['name']}: {_share(mode):.2%} right, {right:.2%} without drafts")
    for mode in spread:
        own = acceptance(total(_scored(mode)))
        if abs(own / usual - 1) > ACCEPTANCE_LIMIT:
            out.append(f"{mode['name']}: {own:.3f} tokens per step, {usual:.3f} with cp 1")
    return out


def _scored(mode: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Suites with one right text: acceptance in texts that differ says nothing about how they were made."""
    return {name: suite for name, suite in mode["suites"].items() if name != UNSCORED}


def _share(mode: dict[str, Any]) -> float:
    scored = total(_scored(mode))
    return scored.n_right / max(1, scored.n)
