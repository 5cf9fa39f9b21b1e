"""R1-R5, R10, R15, R20-R23, R26, R29, R33-R35, R41: positions, slots and bounds derived from the row table."""

import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from k3_kernels.reference.tables import verify_tables

from decode_svc.deployment import Deployment
from decode_svc.ledger import Ledger
from decode_svc.memory import PoolMemory
from decode_svc.rank.rows import DUMMY_ROW, NO_PAGE, RowTable
from decode_svc.rank.step import apply_rows
from decode_svc.rank.tables import GroupBatch, TableBuffers
from decode_svc.request import DecodeRequest, RequestSpec
from decode_svc.scheduler import DecodeScheduler, Emitted, Limits, Plan
from k3.cache.pages import PagePool
from k3.cache.slots import SlotPool
from k3.config.tree import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, ScheduleConfig
from k3.types import RequestId, SamplingParams, StopParams, TokenEvent
from k3.v1 import plan_pb2
from tests.helix_formulas import group_share

pytestmark = pytest.mark.helix

GOLDEN = Path(__file__).parents[3] / "golden"
CPU = torch.device("cpu")


class Rank:
    """Row table and table buffers of one context rank; page ids count up from 0, so pool slots are local slots."""

    def __init__(self, ledger: Ledger, rank: int, drafts: int, width: int = 6, rows: int = 4):
        self.table = RowTable(rows, width, drafts, 512, CPU)
        self.buffers = TableBuffers(self.table, ledger, rank, rows, 1 + drafts)
        self.width, self.drafts = width, drafts

    def open(self, row: int, base: int, pages: list[int] | None = None, epoch: int = 1) -> None:
        opened = plan_pb2.OpenRow(
            row=row,
            epoch=epoch,
            base=base,
            anchor=7,
            pages=list(range(self.width)) if pages is None else pages,
            state_slot=row,
            draft_len=self.drafts,
            output_ids=[7],
        )
        apply_rows(self.table, plan_pb2.StepPlan(open_rows=[opened]))

    def derive(self, *rows: int, max_len: int = 1000) -> GroupBatch:
        self.buffers.choose(rows)
        return self.buffers.derive(len(rows), max_len)

    def commit(self, batch: GroupBatch, accepted: int) -> None:
        n = batch.rows_B.shape[0]
        drawn = torch.full((n,), 9)
        self.table.commit(batch.rows_B, batch.base_B, torch.full((n,), accepted), drawn)


def group(p: int, c: int, base: int, drafts: int) -> list[GroupBatch]:
    """The group's batch on every rank."""
    batches = []
    for r in range(c):
        rank = Rank(Ledger(p, c), r, drafts)
        rank.open(1, base)
        batches.append(rank.derive(1))
    return batches


def test_r1_the_base_is_global_on_every_rank() -> None:
    zero, one = group(2, 2, base=5, drafts=1)
    assert (zero.base_B.tolist(), one.base_B.tolist()) == ([5], [5])
    assert (zero.verify.slot_T.tolist(), zero.verify.bound_T.tolist()) == ([3, -1], [4, 4])
    assert (one.verify.slot_T.tolist(), one.verify.bound_T.tolist()) == ([-1, 2], [2, 3])


def test_r2_positions_are_global_on_every_rank() -> None:
    for batch in group(2, 2, base=5, drafts=1):
        assert (batch.next_T - 1).tolist() == [5, 6]


def test_r3_tables_do_not_depend_on_overlap() -> None:
    """With a step in flight the host's bound is larger; slots and bounds are the same."""
    ledger, drafts = Ledger(4, 2), 1
    for r in range(2):
        rank = Rank(ledger, r, drafts)
        rank.open(1, 9)
        alone = rank.derive(1, max_len=11)
        tables = alone.verify.slot_T.tolist(), alone.verify.bound_T.tolist()
        overlapped = rank.derive(1, max_len=13)
        assert (overlapped.verify.slot_T.tolist(), overlapped.verify.bound_T.tolist()) == tables


def test_r5_tables_have_the_size_of_the_bucket() -> None:
    rank = Rank(Ledger(4, 2), 0, drafts=1)
    for row in (1, 2, 3):
        rank.open(row, 5 + row)
    batch = rank.derive(1, 2, 3, DUMMY_ROW)
    assert batch.verify.bound_T.shape == batch.verify.slot_T.shape == (8,)
    assert batch.verify.bound_T[6:].tolist() == [0, 0]
    assert batch.verify.slot_T[6:].tolist() == [-1, -1]


def test_r10_deriving_again_does_not_move_anything() -> None:
    rank = Rank(Ledger(16, 2), 0, drafts=3, width=8)
    rank.open(1, 100)
    first = rank.derive(1)
    seen = first.verify.slot_T.tolist(), first.verify.bound_T.tolist()
    for _ in range(3):
        again = rank.derive(1)
        assert (again.verify.slot_T.tolist(), again.verify.bound_T.tolist()) == seen
    rank.commit(again, accepted=2)
    assert rank.derive(1).base_B.tolist() == [103]
    rank.commit(rank.derive(1), accepted=3)
    assert rank.derive(1).base_B.tolist() == [107]


@pytest.mark.parametrize("depth", [1, 2])
def test_r15_host_and_device_keep_one_base(depth: int) -> None:
    """The scheduler's confirmed base is always prompt + confirmed output - 1, and the device never lags it."""
    scheduler, ledger = _scheduler(depth=depth), Ledger(4, 2)
    request = _running(scheduler, n=6, m=9)
    rank = Rank(ledger, 1, drafts=0)
    rank.open(1, 6)
    flying: list[Plan] = []
    while request.reservation is not None:
        while (plan := scheduler.plan()) is not None:
            rank.commit(rank.derive(1), accepted=0)
            flying.append(plan)
        _answer(scheduler, flying.pop(0))
        assert request.base == request.prompt_len + len(request.outputs) - 1
        assert int(rank.table.base_R[1]) == request.base + len(flying)


def test_r20_the_default_ledger_is_the_global_one() -> None:
    config = EngineConfig(
        role="decode",
        model=ModelConfig(str(GOLDEN / "k3"), "nano", "float64", "cpu", 64),
        cache=CacheConfig(page_tokens=4, pages=12, state_slots=4),
        schedule=ScheduleConfig(max_rows=3),
    )
    spread = replace(config, parallel=ParallelConfig(cp=2))
    assert Deployment.of(config, "d").scheduler().ledger == Ledger(4, 1)
    assert Deployment.of(spread, "d").scheduler().ledger == Ledger(4, 2)


@pytest.mark.dspark
def test_r21_a_step_of_one_token_follows_an_accepted_group_at_the_right_place() -> None:
    rank = Rank(Ledger(4, 2), 0, drafts=2)
    rank.open(1, 10)
    rank.commit(rank.derive(1), accepted=2)
    assert (rank.derive(1).next_T - 1).tolist()[0] == 13


def test_r22_requests_of_one_moment_share_no_slot_and_no_row() -> None:
    scheduler = _scheduler()
    one, two = _running(scheduler, 5, 4), _running(scheduler, 5, 4)
    assert one.held.state_slot != two.held.state_slot
    assert one.held.row.index != two.held.row.index
    assert not set(one.held.pages) & set(two.held.pages)


def test_r23_the_published_groups_straddle_ranks_and_hold_traps() -> None:
    """What makes the golden tables of groups worth running."""
    packed = (GOLDEN / "helix/verify_groups.json.xz").read_bytes()
    items = json.loads(lzma.decompress(packed))
    groups = [g for item in items for g in item["groups"]]
    owners = [{o for rank in g["ranks"] for o in rank["owner"]} for g in groups]
    assert sum(len(found) > 1 for found in owners) >= 200
    assert sum(g["zero_bound_trap"] for g in groups) >= 60


def test_r26_overlapped_steps_write_consecutive_positions() -> None:
    """No host counter takes part: three launches in a row, nothing acknowledged in between."""
    written = {r: [] for r in range(4)}
    positions = []
    for r in range(4):
        rank = Rank(Ledger(4, 4), r, drafts=0)
        rank.open(1, 17)
        for _ in range(3):
            batch = rank.derive(1)
            if r == 0:
                positions += (batch.next_T - 1).tolist()
            written[r] += [s for s in batch.verify.slot_T.tolist() if s >= 0]
            rank.commit(batch, accepted=0)
    assert positions == [17, 18, 19]
    assert written == {0: [5, 6, 7], 1: [], 2: [], 3: []}


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 15, 16, 17])
def test_r29_the_first_step_continues_the_prompts_rotation(n: int) -> None:
    ledger = Ledger(4, 4)
    owners = [r for r in range(4) if group_share(ledger, n, 1, r).slots[0] >= 0]
    assert owners == [n // 4 % 4]


def test_r33_dummy_rows_have_no_keys_and_no_slots_on_any_rank() -> None:
    for r in range(2):
        rank = Rank(Ledger(4, 2), r, drafts=1)
        for _ in range(3):
            batch = rank.derive(DUMMY_ROW, DUMMY_ROW)
            assert batch.verify.bound_T.tolist() == [0] * 4
            assert batch.verify.slot_T.tolist() == [-1] * 4
            rank.commit(batch, accepted=1)
        assert int(rank.table.base_R[DUMMY_ROW]) == 0


def test_r34_an_allocation_that_failed_first_starts_at_the_same_position() -> None:
    scheduler = _scheduler(pages=4)
    first = _running(scheduler, 9, 8)
    late = _submit(scheduler, 9, 8)
    assert scheduler.admit(1.0) == []
    assert scheduler.admit(2.0) == []
    scheduler.abort(first)
    assert scheduler.admit(3.0) == [late]
    scheduler.fill(late)
    hold = scheduler.requeue(late)
    scheduler.settle(hold)
    assert scheduler.admit(4.0) == [late]
    scheduler.fill(late)
    scheduler.first_token(late, TokenEvent(1))
    scheduler.filled(late)
    assert late.base == 9


def test_r35_a_step_whose_request_is_cancelled_leaves_nothing_behind() -> None:
    scheduler = _scheduler(depth=2)
    before = scheduler.memory.page_counts()
    request = _running(scheduler, 9, 8)
    plans = [scheduler.plan(), scheduler.plan()]
    scheduler.abort(request)
    for plan in plans:
        assert plan is not None
        _answer(scheduler, plan)
    assert scheduler.memory.page_counts() == before
    assert scheduler.rank_tokens() == [0, 0]


def test_a_reservation_that_is_too_small_is_a_bug_and_stops_the_service() -> None:
    """Running requests are never refused memory: the worst case was reserved."""
    scheduler = _scheduler()
    request = _running(scheduler, 9, 8)
    request.reservation = replace(request.held, pages=request.held.pages[:1])
    with pytest.raises(AssertionError, match="2 pages needed, 1 reserved"):
        scheduler.plan()


def test_r41_a_position_past_the_table_is_never_written() -> None:
    pages = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    valid = torch.ones(2, 3, dtype=torch.bool)
    for r in range(2):
        _, slot, _ = verify_tables(torch.tensor([14, 40]), pages, valid, 4, 2, r)
        assert slot.tolist() == ([-1] * 6 if r == 0 else [6, 7, -1, -1, -1, -1])


def test_r41_pages_of_a_rows_last_holder_are_not_written_by_the_next_one() -> None:
    rank = Rank(Ledger(4, 2), 0, drafts=3)
    rank.open(1, 30, pages=[5, 4, 3, 2, 1])
    closed = plan_pb2.CloseRow(row=1, epoch=1)
    apply_rows(rank.table, plan_pb2.StepPlan(close_rows=[closed]))
    rank.open(1, 7, pages=[0], epoch=2)
    assert rank.table.pages_RW[1].tolist() == [0] + [NO_PAGE] * 5
    assert rank.derive(1).verify.slot_T.tolist() == [-1, -1, -1, -1]  # 7 is rank 1's, 8 has no page


def _scheduler(*, depth: int = 2, pages: int = 20) -> DecodeScheduler:
    return DecodeScheduler(
        Ledger(4, 2),
        Limits(max_queue=4, max_model_len=100, depth=depth),
        memory=PoolMemory(PagePool(pages), SlotPool(3, first=1)),
        rows=SlotPool(3, first=1),
    )


def _submit(scheduler: DecodeScheduler, n: int, m: int) -> DecodeRequest:
    spec = RequestSpec(RequestId("r"), (1,) * n, SamplingParams(), StopParams(m))
    return scheduler.submit(spec, 0.0)


def _running(scheduler: DecodeScheduler, n: int, m: int) -> DecodeRequest:
    request = _submit(scheduler, n, m)
    assert request in scheduler.admit(0.0)
    scheduler.fill(request)
    scheduler.first_token(request, TokenEvent(1))
    scheduler.filled(request)
    return request


def _answer(scheduler: DecodeScheduler, plan: Plan) -> None:
    emitted = [Emitted(s.row.index, s.row.epoch, (TokenEvent(2),)) for s in plan.rows]
    scheduler.advance(plan.step_id, emitted)
