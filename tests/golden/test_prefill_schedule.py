"""The chunk planner and the pipelining of one prompt against published tables; cases without checkpoints and holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefill_svc.core.scheduler import Policy, PrefillScheduler
from prefill_svc.core.timeline import Arrival, run

pytestmark = pytest.mark.prefill

FOLDER = Path(__file__).parent / "prefix"


def cases(table: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{table}.json").read_text())["cases"]


def scheduler(budget: int, align: int, inflight: int, page_tokens: int) -> PrefillScheduler:
    policy = Policy(
        token_budget=budget,
        max_inflight=inflight,
        chunk_align=align,
        max_running=1,
        max_queue=1,
        short_len=budget,
    )
    return PrefillScheduler(policy, n_pages=4096, n_slots=1, page_tokens=page_tokens)


PLAIN = [
    case
    for case in cases("checkpoint_schedule")
    if case["in"]["start"] == 0 and not any(chunk["file"] for chunk in case["chunks"])
]


@pytest.mark.parametrize("case", PLAIN, ids=[case["id"] for case in PLAIN])
def test_chunk_boundaries_of_one_prompt(case: dict[str, Any]) -> None:
    given = case["in"]
    s = scheduler(given["chunk_budget"], given["chunk_align"], 1, given["hash_block"])
    s.submit(1, given["prompt_len"], 0.0)
    got = []
    while (plan := s.plan(0.0)) is not None:
        (chunk,) = plan.chunks
        got.append((chunk.start, chunk.end, chunk.is_final))
        s.advance(plan.step_id, [(1, 1)] if chunk.is_final else [])
    assert got == [(c["start"], c["end"], c["final"]) for c in case["chunks"]]


FREE = [case for case in cases("pp_timeline") if not any(case["in"]["held_after"])]


@pytest.mark.parametrize("case", FREE, ids=[case["id"] for case in FREE])
def test_chunks_of_one_prompt_overlap_in_the_pipeline(case: dict[str, Any]) -> None:
    given = case["in"]
    costs = given["costs"]
    line = run(
        scheduler(4, 4, given["max_inflight"], 4),
        given["pp"],
        lambda plan: costs[plan.step_id - 1],
        [Arrival(1, 4 * len(costs))],
    )
    assert [[list(span) for span in flight.spans] for flight in line.flights] == case["out"][
        "spans"
    ]
    assert line.makespan == case["out"]["makespan"]
    assert line.occupancy == pytest.approx(case["out"]["busy_fraction"], abs=1e-6)
