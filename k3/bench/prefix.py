"""`k3-bench prefix`: what the prefix cache saves in a conversation: the same turns with the cache and without it.

Two clusters of their own, one after the other. After every turn prefill's counters say what the prompt found: `chain`
tokens were cached, `wanted` of them usable had every page a checkpoint, `hit` were skipped; `lost` = wanted - hit.
Compute is what prefill did for the turn, in tokens and in seconds of its steps. Answers must be equal in both clusters:
that, and the share of the last turn's compute, decide the exit code.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from k3.bench.prompts import ChatWorkload
from k3.cluster import LocalCluster, Options, get
from k3.errors import ConfigError, K3Error

MODES = ("off", "on")
MOST_SHARE = 0.2  # of the last turn's compute
SERIES = {
    "chain": "k3_prefix_chain_tokens_total",
    "wanted": "k3_prefix_wanted_tokens_total",
    "hit": "k3_prefix_hit_tokens_total",
    "computed": "k3_prefill_tokens_total",
    "seconds": "k3_prefill_chunk_seconds_sum",
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn in one mode: tokens of the prompt, what it found, and what prefill did for it."""

    number: int
    prompt: int
    chain: int
    wanted: int
    hit: int
    computed: int
    seconds: float
    answer: str

    @property
    def lost(self) -> int:
        """Tokens computed again for want of a checkpoint."""
        return self.wanted - self.hit


@dataclass(frozen=True, slots=True)
class Saving:
    """A turn without the cache and with it."""

    off: Turn
    on: Turn

    @property
    def token_share(self) -> float:
        """Tokens computed with the cache, of those without."""
        return self.on.computed / self.off.computed

    @property
    def time_share(self) -> float:
        """The same in seconds of prefill steps."""
        return self.on.seconds / self.off.seconds


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    p.add_argument("--turns", type=int, default=8, help="questions of the conversation")
    p.add_argument("--model", default="", help="model folder")
    p.add_argument("--answer-tokens", type=int, default=64, help="longest answer of a turn")
    p.add_argument("--interval", type=int, default=0, help="cache.checkpoint_interval; 0 = preset")
    p.add_argument("--pp", type=int, default=1, help="stages of prefill")
    p.add_argument("--json", type=Path, help="write the figures there")


def run(args: argparse.Namespace, console: Console) -> int:
    """0 when both modes answer alike and the last turn costs less than `MOST_SHARE` of its compute; else 1."""
    if min(args.turns, args.answer_tokens, args.pp) < 1 or args.interval < 0:
        raise ConfigError(
            f"--turns {args.turns} --answer-tokens {args.answer_tokens} --pp {args.pp} --interval {args.interval}: "
            "the interval must be at least 0 (0 = the preset's), the others at least 1"
        )
    turns: dict[str, list[Turn]] = {}
    for mode in MODES:
        console.print(f"cache {mode}: starting a local cluster")
        with LocalCluster(options(mode, args)) as cluster:
            turns[mode] = list(converse(cluster, args.turns, args.answer_tokens))
    savings = [Saving(off, on) for off, on in zip(turns["off"], turns["on"], strict=True)]
    if args.json:
        args.json.write_text(json.dumps([asdict(saving) for saving in savings], indent=1) + "\n")
    show(savings, console)
    is_equal = all(saving.off.answer == saving.on.answer for saving in savings)
    return 0 if is_equal and savings[-1].token_share < MOST_SHARE else 1


def options(mode: str, args: argparse.Namespace) -> Options:
    """Flags of a mode's cluster."""
    model = ("--model", args.model) if args.model else ()
    is_given = mode == "on" and args.interval
    interval = ("--cache-checkpoint-interval", str(args.interval)) if is_given else ()
    stages = ("--parallel-pp", str(args.pp))
    return Options(
        router_flags=model,
        prefill_flags=(*model, *stages, "--cache-prefix", mode, *interval),
        decode_flags=model,
    )


def converse(cluster: LocalCluster, n_turns: int, answer_tokens: int) -> Iterator[Turn]:
    """One conversation, turn by turn. K3Error when an answer does not come."""
    ops, questions = cluster.prefills[0].ops, ChatWorkload(answer_tokens, seed=0)
    messages: list[dict[str, str]] = []
    before = counters(ops)
    with httpx.Client(base_url=cluster.url, timeout=600.0, trust_env=False) as client:
        for number in range(1, n_turns + 1):
            call = questions.call(number)
            messages += call.body["messages"]
            answer = client.post(call.path, json={**call.body, "messages": messages})
            if answer.status_code != 200:
                raise K3Error(f"turn {number}: HTTP {answer.status_code}: {answer.text[:200]}")
            body = answer.json()
            text = str(body["choices"][0]["message"]["content"] or "")
            messages.append({"role": "assistant", "content": text})
            now = counters(ops)
            grown = {name: now[name] - before[name] for name in SERIES}
            seconds = grown.pop("seconds")
            tokens = {name: int(n) for name, n in grown.items()}
            prompt = body["usage"]["prompt_tokens"]
            yield Turn(number=number, prompt=prompt, seconds=seconds, answer=text, **tokens)
            before = now


def counters(ops: str) -> dict[str, float]:
    """Prefill's counters by our names. K3Error when one is missing."""
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(get(ops, "/metrics").body)
        for sample in family.samples
    }
    missing = [series for series in SERIES.values() if series not in samples]
    if missing:
        raise K3Error(f"{ops}/metrics has no series {missing}; is it a k3-prefill?")
    return {name: samples[series] for name, series in SERIES.items()}


def show(savings: list[Saving], console: Console) -> None:
    """The table: what each turn found, and its compute with / without the cache."""
    names = (
        "turn",
        "prompt",
        "chain",
        "wanted",
        "hit",
        "lost",
        "computed",
        "share",
        "seconds",
        "share",
    )
    table = Table(*names, box=None, pad_edge=False)
    for saving in savings:
        off, on = saving.off, saving.on
        table.add_row(
            *(str(n) for n in (on.number, on.prompt, on.chain, on.wanted, on.hit, on.lost)),
            *(f"{on.computed} / {off.computed}", f"{saving.token_share:.1%}"),
            *(f"{on.seconds:.2f} / {off.seconds:.2f}", f"{saving.time_share:.1%}"),
        )
    console.print(table)
    differ = [saving.on.number for saving in savings if saving.off.answer != saving.on.answer]
    console.print(f"answers DIFFER in turns {differ}" if differ else "answers are equal")
