"""Verify groups over stages against the golden table: what the front sends, and where every stage puts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from k3_kernels.reference.tables import verify_tables

from decode_svc.ledger import Ledger
from decode_svc.memory import PoolMemory
from decode_svc.plan import Emitted, Plan, RowStep
from decode_svc.request import RequestSpec
from decode_svc.scheduler import DecodeScheduler, Limits
from k3.cache.pages import PagePool
from k3.cache.slots import SlotPool
from k3.types import RequestId, SamplingParams, StopParams, TokenEvent

pytestmark = pytest.mark.prefill

CASES = json.loads((Path(__file__).parent / "verify_window.json").read_text())["cases"]
STAGES = 2


class Front:
    """One request of a staged decode front, its drafts numbered 1000, 1001, ..."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.k, n = given["k"], given["prompt_len"]
        self.ledger = Ledger(given["block"])
        limits = Limits(4, 400, depth=STAGES, draft_tokens=self.k, is_staged=True)
        self.scheduler = DecodeScheduler(
            self.ledger,
            limits,
            memory=PoolMemory(PagePool(40), SlotPool(2)),
            rows=SlotPool(2, first=1),
        )
        spec = RequestSpec(RequestId("r"), (1,) * n, SamplingParams(), StopParams(99))
        self.request = self.scheduler.submit(spec, 0.0)
        self.scheduler.admit(0.0)
        self.scheduler.fill(self.request)
        self.scheduler.first_token(self.request, TokenEvent(7))
        self.scheduler.filled(self.request)
        self.newest = 7

    def plan(self) -> tuple[Plan, RowStep]:
        plan = self.scheduler.plan()
        assert plan is not None
        assert self.scheduler.plan() is None, "a row is in one step at a time"
        (step,) = plan.rows
        return plan, step

    def drafts(self) -> tuple[int, ...]:
        return tuple(range(1000, 1000 + self.k))

    def answer(self, plan: Plan, step: RowStep, n: int) -> None:
        tokens = [self.newest + i + 1 for i in range(n)]
        self.newest += n
        events = tuple(map(TokenEvent, tokens))
        emitted = Emitted(step.row.index, step.row.epoch, events, self.k, (), self.drafts())
        self.scheduler.advance(plan.step_id, [emitted])


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_groups_lie_where_the_golden_table_says(case: dict[str, Any]) -> None:
    front = Front(case["in"])
    plan, opening = front.plan()
    assert opening.opens, "the first drafts are proposed on the rows prefill handed over"
    front.answer(plan, opening, 0)
    width = front.k + 1
    for golden in case["steps"]:
        plan, step = front.plan()
        assert (plan.group_len, step.draft_len, step.opens) == (width, front.k, False)
        state = step.state
        assert state is not None
        assert state.base == golden["stage_offset"] == golden["committed_before"] - 1
        assert state.anchor == front.newest
        assert state.drafts == front.drafts()
        assert max(0, state.read_column) == golden["resume_column"] == golden["num_accepted_in"] - 1
        table = torch.tensor([front.request.held.pages], dtype=torch.int32)
        valid = torch.ones(1, width, dtype=torch.bool)
        position, slot, bound = verify_tables(
            torch.tensor([state.base]), table, valid, front.ledger.page_tokens, 1, 0
        )
        assert position.flatten().tolist() == golden["positions"]
        places = zip(golden["block_index"], golden["block_offset"], strict=True)
        pages = front.request.held.pages
        assert slot.tolist() == [pages[b] * case["in"]["block"] + o for b, o in places]
        assert bound[-1].item() == golden["ctx_len"]
        front.answer(plan, step, golden["emitted"])
        assert front.request.base == golden["kv_valid_after"] == golden["committed_after"] - 1
        assert front.request.read_column == golden["num_bonus"]
        assert front.k - front.request.read_column == golden["num_rejected"]
