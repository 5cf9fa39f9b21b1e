"""The chunk planner and the pipelining of one prompt against published tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefill_svc.core.checkpoints import Mode
from prefill_svc.core.ladder import Ladder, RungPolicy
from prefill_svc.core.scheduler import Policy, PrefillScheduler
from prefill_svc.core.timeline import Arrival, run

pytestmark = pytest.mark.prefill

FOLDER = Path(__file__).parent / "prefix"


def cases(table: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{table}.json").read_text())["cases"]


def scheduler(
    budget: int, align: int, inflight: int, ladder: Ladder, mode: Mode = Mode.FORK_AT_SCHEDULE
) -> PrefillScheduler:
    policy = Policy(
        token_budget=budget,
        max_inflight=inflight,
        chunk_align=align,
        max_running=1,
        max_queue=1,
        short_len=budget,
    )
    return PrefillScheduler(
        policy, n_pages=4096, n_slots=16, page_tokens=ladder.page_tokens, ladder=ladder, mode=mode
    )


FROM_THE_START = [
    case
    for case in cases("checkpoint_schedule")
    if case["in"]["start"] == 0 and not case["in"]["demand_pos"]
]


@pytest.mark.parametrize("case", FROM_THE_START, ids=[case["id"] for case in FROM_THE_START])
def test_chunk_boundaries_of_one_prompt(case: dict[str, Any]) -> None:
    given = case["in"]
    ladder = Ladder(
        given["hash_block"],
        given["interval"],
        given["anchor"],
        given["successor_room"],
        RungPolicy(given["rung_policy"]),
    )
    s = scheduler(given["chunk_budget"], given["chunk_align"], 1, ladder)
    s.submit(1, given["prompt_len"], 0.0)
    got = []
    while (plan := s.plan(0.0)) is not None:
        (chunk,) = plan.chunks
        got.append((chunk.start, chunk.end, chunk.is_final))
        s.advance(plan.step_id, [(1, 1)] if chunk.is_final else [])
    assert got == [(c["start"], c["end"], c["final"]) for c in case["chunks"]]


TIMELINES = cases("pp_timeline")


@pytest.mark.parametrize("case", TIMELINES, ids=[case["id"] for case in TIMELINES])
def test_chunks_of_one_prompt_overlap_in_the_pipeline(case: dict[str, Any]) -> None:
    """Except where a state must be filed before the prompt may go on."""
    given = case["in"]
    costs, held = given["costs"], given["held_after"]
    rung = 4 * (held.index(1) + 1) if any(held) else 0
    line = run(
        scheduler(4, 4, given["max_inflight"], Ladder(4, rung), Mode.FORK_HOLD),
        given["pp"],
        lambda plan: costs[plan.step_id - 1],
        [Arrival(1, 4 * len(costs), chain=tuple(bytes([i]) for i in range(len(costs))))],
    )
    assert [[list(span) for span in flight.spans] for flight in line.flights] == case["out"][
        "spans"
    ]
    assert line.makespan == case["out"]["makespan"]
    assert line.occupancy == pytest.approx(case["out"]["busy_fraction"], abs=1e-6)


HELD = [case for case in TIMELINES if any(case["in"]["held_after"])]


@pytest.mark.parametrize("case", HELD, ids=[case["id"] for case in HELD])
def test_forks_when_a_chunk_is_planned_cost_no_bubble(case: dict[str, Any]) -> None:
    """The same states are kept as under holds, in the time of a prompt that keeps none."""
    given = case["in"]
    n, pp = len(given["costs"]), given["pp"]
    s = scheduler(4, 4, pp, Ladder(4, 4 * (given["held_after"].index(1) + 1)))
    chain = tuple(bytes([i]) for i in range(n))
    line = run(s, pp, lambda plan: 1.0, [Arrival(1, 4 * n, chain=chain)])
    assert line.makespan == n + pp - 1
    assert s.cache.slots.counters.kept == sum(given["held_after"])
