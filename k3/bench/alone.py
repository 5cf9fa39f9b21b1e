"""Requests answered by one process that prefills and decodes by itself: `decode_svc.rank.alone` as a child."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from k3.bench.answers import Exchange
from k3.bench.speculation import Acceptance
from k3.errors import K3Error
from k3.process import die_with_parent

MODULE = "decode_svc.rank.alone"  # of a service, which nothing in this package imports


@dataclass(frozen=True, slots=True)
class Alone:
    """What came back. ids: in the order of the requests. fill_s: in prefill. step_s, forward_s: over decode steps."""

    ids: tuple[tuple[int, ...], ...]
    acceptance: Acceptance | None
    seconds: float
    fill_s: float
    n_steps: int
    step_s: float
    forward_s: float


def answer_alone(
    exchanges: Sequence[Exchange], flags: Sequence[str], n_rows: int, timeout_s: float
) -> Alone:
    """Ask again what was asked, `n_rows` at once. K3Error when the process fails or takes longer than `timeout_s`."""
    ends = sorted({x.ids[-1] for x in exchanges if x.ends_itself})
    lines = [
        json.dumps(
            {
                "prompt": x.prompt,
                "max_tokens": x.limit,
                "end_ids": ends,
                "temperature": x.temperature,
                "seed": x.seed,
            }
        )
        for x in exchanges
    ]
    rows = ("--max-rows", str(n_rows), "--schedule-max-queue", str(len(exchanges)))
    command = [sys.executable, "-m", MODULE, *flags, *rows]
    try:
        done = subprocess.run(
            command,
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            preexec_fn=die_with_parent(),
        )
    except subprocess.TimeoutExpired as error:
        raise K3Error(
            f"{MODULE} did not answer {len(lines)} requests in {timeout_s:g} s"
        ) from error
    if done.returncode:
        raise K3Error(f"{MODULE} ended with status {done.returncode}: {done.stderr[-2000:]}")
    *answers, totals = [json.loads(line) for line in done.stdout.splitlines()]
    return Alone(tuple(tuple(answer["ids"]) for answer in answers), _acceptance(answers), **totals)


def _acceptance(answers: Sequence[dict[str, Any]]) -> Acceptance | None:
    total: Acceptance | None = None
    for answer in answers:
        if answer["histogram"] is not None:
            one = Acceptance(tuple(answer["histogram"]))
            total = one if total is None else total.plus(one)
    return total
