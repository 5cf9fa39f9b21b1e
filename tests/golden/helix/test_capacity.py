"""Capacity arithmetic and the admission rule against the published tables: capacity.json, admission.json."""

import json
from pathlib import Path

import pytest

from decode_svc.capacity import worst_len
from decode_svc.ledger import Ledger
from decode_svc.memory import PoolMemory
from decode_svc.request import DecodeRequest, RequestSpec, State
from decode_svc.scheduler import DecodeScheduler, Limits
from k3.cache.pages import PagePool
from k3.cache.slots import SlotPool
from k3.errors import RequestRejected
from k3.types import RequestId, SamplingParams, StopParams, TokenEvent
from tests.helix_formulas import DraftCost, PoolCost, StateCost, global_to_local, local_to_global

pytestmark = pytest.mark.helix

HERE = Path(__file__).parent
CAPACITY = json.loads((HERE / "capacity.json").read_text())
ADMISSION = json.loads((HERE / "admission.json").read_text())


@pytest.mark.parametrize("case", CAPACITY["budget"])
def test_bytes_become_pages_with_the_mapping_the_pools_use(case: dict) -> None:
    expect, kda, draft = case["expect"], case["kda"], case["draft"]
    ledger, shards = Ledger(case["page_tokens"], case["cp_size"]), case["tp_size"] * case["cp_size"]
    state = StateCost(
        kda["layers"],
        kda["heads"],
        kda["head_dim"],
        kda["conv_kernel"],
        kda["state_bytes"],
        kda["conv_bytes"],
    )
    draft_bytes = DraftCost(**draft).of(shards) if draft else 0
    cost = PoolCost(
        ledger,
        case["target_bytes_per_local_token"],
        state.of(shards),
        draft_token_bytes=draft_bytes,
    )
    pages = cost.pages(case["budget_bytes"], case["slots"])
    assert shards == expect["effective_tp"]
    assert case["slots"] * cost.slot_bytes == expect["kda_bytes"]
    assert draft_bytes == expect["draft_bytes_per_global_token"]
    assert draft_bytes * ledger.cp == expect["draft_bytes_per_local_token"]
    assert (cost.page_bytes, pages) == (expect["bytes_per_block"], expect["blocks"])
    assert cost.capacity(pages) == expect["capacity_tokens"]
    target = pages * ledger.page_tokens * case["target_bytes_per_local_token"]
    assert target == expect["target_pool_bytes"]
    assert pages * ledger.block_tokens * draft_bytes == expect["draft_pool_bytes"]


def test_a_draft_ring_is_a_fixed_cost_of_its_slots() -> None:
    ledger = Ledger(64, 16)
    paged = PoolCost(ledger, 27648, 1000, draft_token_bytes=5760)
    ring = PoolCost(ledger, 27648, 1000, draft_token_bytes=5760, ring_rows=8192 + 64)
    assert paged.page_bytes - ring.page_bytes == ledger.block_tokens * 5760
    budget = 10 * ring.page_bytes + 3 * 1000 + 2 * (8192 + 64) * 5760
    assert ring.pages(budget, 3, draft_slots=2) == 10
    assert ring.pages(budget - 1, 3, draft_slots=2) == 9


def test_conversions_buy_down_and_pay_up() -> None:
    for case in CAPACITY["local_to_global"]:
        ledger = Ledger(case["page_tokens"], case["cp_size"])
        assert local_to_global(ledger, case["local_tokens"]) == case["tokens"], case
    for case in CAPACITY["global_to_local"]:
        ledger = Ledger(case["page_tokens"], case["cp_size"])
        assert global_to_local(ledger, case["tokens"]) == case["local_tokens"], case


@pytest.mark.parametrize("case", CAPACITY["worst_case_length"])
def test_worst_case_length(case: dict) -> None:
    found = worst_len(case["prompt_len"], case["max_new"], case["draft_len"], case["in_flight"])
    assert found == case["length"]


class _Story:
    """Feeds an admission trace to the scheduler; a request that was admitted runs at once."""

    def __init__(self, trace: dict) -> None:
        self.scheduler = DecodeScheduler(
            Ledger(trace["page_tokens"], trace["cp_size"]),
            Limits(
                max_queue=100,
                max_model_len=trace["max_model_len"],
                depth=trace["in_flight"] + 1,
                draft_tokens=trace["draft_len"],
            ),
            memory=PoolMemory(PagePool(trace["total_blocks"]), SlotPool(trace["slots"], first=1)),
            rows=SlotPool(trace["slots"], first=1),
        )
        self.requests: dict[str, DecodeRequest] = {}
        self.refused: list[str] = []

    def arrive(self, name: str, prompt_len: int, max_new: int) -> None:
        spec = RequestSpec(
            RequestId(name), (1,) * prompt_len, SamplingParams(), StopParams(max_tokens=max_new)
        )
        try:
            self.requests[name] = self.scheduler.submit(spec, 0.0)
        except RequestRejected:
            self.refused.append(name)

    def end(self, name: str) -> None:
        request = self.requests.pop(name)
        if request.state is State.RUNNING:
            self.scheduler.abort(request)
        else:
            self.scheduler.drop(request)

    def settle(self) -> None:
        for request in self.scheduler.admit(0.0):
            self.scheduler.fill(request)
            self.scheduler.first_token(request, TokenEvent(7))
            self.scheduler.filled(request)

    def names(self, *states: State) -> list[str]:
        return [name for name, request in self.requests.items() if request.state in states]


@pytest.mark.parametrize("trace", ADMISSION, ids=["helix4", "helix16"])
def test_admission_follows_the_published_trace(trace: dict) -> None:
    story = _Story(trace)
    for step in trace["steps"]:
        match step["event"]:
            case ["arrive", name, prompt_len, max_new]:
                story.arrive(name, prompt_len, max_new)
            case ["end", name]:
                story.end(name)
        story.settle()
        assert sorted(story.names(State.RUNNING)) == sorted(step["running"]), step
        assert story.names(State.QUEUED) == step["queued"], step
        assert story.refused == step["refused"], step
        assert story.scheduler.memory.page_counts().free == step["free_blocks"], step
        assert story.scheduler.rows.available == step["free_slots"], step
