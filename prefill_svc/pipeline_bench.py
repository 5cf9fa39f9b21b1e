"""`k3-bench pipeline`: what the prefill schedule is worth, with the real scheduler and simulated stage times.

One long prompt alone: share of the stages' time in which they compute, beside the most that m chunks over P stages
allow. The long prompt with short ones that come while it runs: the steps they start in, beside the promised ones.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from k3.errors import ConfigError
from prefill_svc.core import timeline
from prefill_svc.core.checkpoints import Mode
from prefill_svc.core.ladder import Ladder
from prefill_svc.core.scheduler import Plan, Policy, PrefillScheduler
from prefill_svc.core.timeline import Arrival

OCCUPANCY_BAR = 0.9  # of what is possible


@dataclass(frozen=True, slots=True)
class Load:
    """What is simulated. step_s, token_s: seconds of a stage per plan and per token."""

    prompt: int
    shorts: int
    short: int
    budget: int
    page_tokens: int
    step_s: float
    token_s: float

    def seconds(self, plan: Plan) -> float:
        """Of a plan, on one stage."""
        return self.step_s + plan.n_tokens * self.token_s

    def scheduler(
        self, pp: int, interval: int = 0, mode: Mode = Mode.FORK_AT_SCHEDULE
    ) -> PrefillScheduler:
        """As a service with these settings has it, with room for all. interval: of checkpoints, 0 = none."""
        policy = Policy(
            token_budget=self.budget,
            max_inflight=pp,
            chunk_align=self.page_tokens,
            max_running=1 + self.shorts,
            max_queue=1 + self.shorts,
            short_len=self.budget,
            max_long=pp,
        )
        n_pages = -(-self.prompt // self.page_tokens) + self.shorts * (
            1 + self.short // self.page_tokens
        )
        n_kept = self.prompt // interval if interval else 0
        return PrefillScheduler(
            policy,
            n_pages=n_pages,
            n_slots=2 * (1 + self.shorts) + pp + n_kept,
            page_tokens=self.page_tokens,
            ladder=Ladder(self.page_tokens, interval),
            mode=mode,
        )


@dataclass(frozen=True, slots=True)
class Occupancy:
    """One long prompt alone: `possible` is m / (m + P - 1).

    forked, held: with the state of every chunk kept, filed when it is planned, or before the prompt may go on.
    """

    stages: int
    chunks: int
    in_flight: int
    occupancy: float
    possible: float
    forked: float
    held: float


@dataclass(frozen=True, slots=True)
class Fairness:
    """A long prompt beside short ones. Steps are of the last short one to start; delays of the long one's end."""

    stages: int
    waited_steps: int
    promised_steps: int
    is_kept: bool  # by every short prompt
    short_s: float
    long_s: float
    long_alone_s: float


def lone(load: Load, pp: int) -> Occupancy:
    """The long prompt and nothing else."""
    chain = tuple(i.to_bytes(16, "big") for i in range(load.prompt // load.page_tokens))
    prompt, rung = (
        Arrival(1, load.prompt, chain=chain),
        load.budget - load.budget % load.page_tokens,
    )

    def busy(interval: int, mode: Mode) -> timeline.Timeline:
        return timeline.run(load.scheduler(pp, interval, mode), pp, load.seconds, [prompt])

    line = busy(0, Mode.FORK_AT_SCHEDULE)
    m = len(line.flights)
    return Occupancy(
        stages=pp,
        chunks=m,
        in_flight=line.max_inflight,
        occupancy=line.occupancy,
        possible=m / (m + pp - 1),
        forked=busy(rung, Mode.FORK_AT_SCHEDULE).occupancy,
        held=busy(rung, Mode.FORK_HOLD).occupancy,
    )


def crowded(load: Load, pp: int) -> Fairness:
    """All short prompts come at once, half a step after the long one began."""
    long = Arrival(1, load.prompt)
    at = (load.step_s + load.budget * load.token_s) / 2
    shorts = [Arrival(key, load.short, at) for key in range(2, 2 + load.shorts)]
    scheduler = load.scheduler(pp)
    line = timeline.run(scheduler, pp, load.seconds, [long, *shorts])
    reserve = int(scheduler.policy.short_share * load.budget)
    promised = [-(-(i + 1) * load.short // reserve) + pp for i in range(load.shorts)]
    waited = [line.waited_steps(short.key) for short in shorts]
    alone = timeline.run(load.scheduler(pp), pp, load.seconds, [long])
    return Fairness(
        stages=pp,
        waited_steps=max(waited),
        promised_steps=promised[waited.index(max(waited))],
        is_kept=all(w <= p for w, p in zip(waited, promised, strict=True)),
        short_s=max(line.done_at[short.key] for short in shorts) - at,
        long_s=line.done_at[1],
        long_alone_s=alone.done_at[1],
    )


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    p.add_argument("--stages", default="1,2,4,8", help="numbers of stages to compare")
    p.add_argument("--prompt", type=int, default=8192, help="tokens of the long prompt")
    p.add_argument("--shorts", type=int, default=16, help="short prompts beside it")
    p.add_argument("--short", type=int, default=64, help="tokens of each of them")
    p.add_argument("--budget", type=int, default=512, help="schedule.token_budget")
    p.add_argument("--page-tokens", type=int, default=16, help="cache.page_tokens")
    p.add_argument("--step-ms", type=float, default=2.0, help="a stage's time per plan")
    p.add_argument("--token-us", type=float, default=100.0, help="a stage's time per token")
    p.add_argument("--json", type=Path, help="write the figures there")


def run(args: argparse.Namespace, console: Console) -> int:
    """Print both tables; 1 when a promise is not kept. Raises ConfigError for arguments that make no sense."""
    stages = [int(word) for word in args.stages.split(",") if word.strip().isdecimal()]
    sizes = (args.prompt, args.shorts, args.short, args.budget, args.page_tokens, *stages)
    if not stages or min(sizes) < 1 or args.budget < args.page_tokens:
        raise ConfigError(
            f"--stages {args.stages} --prompt {args.prompt} --shorts {args.shorts} --short {args.short} "
            f"--budget {args.budget} --page-tokens {args.page_tokens}: all must be at least 1, and a step must "
            "hold a page"
        )
    load = Load(*sizes[:5], args.step_ms / 1e3, args.token_us / 1e6)
    alone = [lone(load, pp) for pp in stages]
    beside = [crowded(load, pp) for pp in stages]
    console.print(_occupancy_table(load, alone))
    console.print(_fairness_table(load, beside))
    if args.json is not None:
        found = {"load": asdict(load), "occupancy": alone, "fairness": beside}
        args.json.write_text(json.dumps(found, default=asdict, indent=2) + "\n")
    is_busy = all(
        min(found.occupancy, found.forked) >= OCCUPANCY_BAR * found.possible for found in alone
    )
    return 0 if is_busy and all(found.is_kept for found in beside) else 1


def _occupancy_table(load: Load, rows: list[Occupancy]) -> Table:
    table = Table(title=f"one prompt of {load.prompt} tokens, {load.budget} per step")
    headings = ("stages", "chunks", "in flight", "possible", "busy", "states kept", "with holds")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.stages}",
            f"{row.chunks}",
            f"{row.in_flight}",
            f"{row.possible:.1%}",
            f"{row.occupancy:.1%}",
            f"{row.forked:.1%}",
            f"{row.held:.1%}",
        )
    return table


def _fairness_table(load: Load, rows: list[Fairness]) -> Table:
    table = Table(title=f"beside it {load.shorts} prompts of {load.short} tokens")
    for heading in (
        "stages",
        "last starts in step",
        "promised",
        "kept",
        "all short ones done after",
    ):
        table.add_column(heading, justify="right")
    table.add_column("long one done after (alone)", justify="right")
    for row in rows:
        table.add_row(
            f"{row.stages}",
            f"{row.waited_steps}",
            f"{row.promised_steps}",
            "yes" if row.is_kept else "no",
            f"{row.short_s * 1e3:.0f} ms",
            f"{row.long_s * 1e3:.0f} ms ({row.long_alone_s * 1e3:.0f} ms)",
        )
    return table
