"""The rank's loop: one answer per plan in order, with and without a device that lags behind."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_svc.rank import loop
from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.config.tree import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig, SpecConfig
from k3.device import CpuDevice
from k3.model.k3 import Stage
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import Mesh
from k3.rank.context import RankContext
from k3.v1 import common_pb2, plan_pb2
from tests.model_runner import solo_stage

NANO = Path(__file__).parents[3] / "golden" / "k3"
CONFIG = EngineConfig(
    role="decode",
    model=ModelConfig(str(NANO), "nano", "float64", "cpu", 40),
    cache=CacheConfig(page_tokens=4, pages=12, state_slots=4),
    schedule=ScheduleConfig(max_rows=3, depth=2),
)


@pytest.fixture(scope="module")
def stage() -> Stage:
    return solo_stage(NANO, "float64")


class Plans:
    """The front: messages are handed out as asked for, `depth` plans ahead of the answers at most."""

    def __init__(self, messages: list[plan_pb2.FrontMessage], depth: int = 2) -> None:
        self.depth = depth
        self.waiting = deque(messages)
        self.sent: list[plan_pb2.RankMessage] = []
        self.order: list[str] = []

    def receive(self) -> plan_pb2.FrontMessage:
        if not self.waiting:
            raise EOFError("the front is gone")
        return self._next()

    def receive_ready(self) -> list[plan_pb2.FrontMessage]:
        ahead = sum(1 if entry.startswith("plan") else -1 for entry in self.order)
        return [self._next()] if self.waiting and ahead < self.depth else []

    def _next(self) -> plan_pb2.FrontMessage:
        message = self.waiting.popleft()
        if message.HasField("plan"):
            self.order.append(f"plan {message.plan.step_id}")
        return message

    def send(self, message: plan_pb2.RankMessage) -> None:
        self.sent.append(message)
        if message.HasField("result"):
            self.order.append(f"result {message.result.step_id}")

    def results(self) -> list[plan_pb2.StepResult]:
        return [m.result for m in self.sent if m.HasField("result")]


class LaggingDevice(CpuDevice):
    """Its events complete only when they were asked often enough."""

    def __init__(self, lag: int) -> None:
        super().__init__(1)
        self.lag = lag

    def record(self) -> Any:
        class Event:
            left = self.lag

            def query(self) -> bool:
                self.left -= 1
                return self.left < 0

            def synchronize(self) -> None:
                self.left = 0

        return Event()


def context(
    stage: Stage, plans: Plans, *, lag: int = 0, spec: SpecConfig = CONFIG.spec, **schedule: int
) -> RankContext:
    config = replace(CONFIG, schedule=replace(CONFIG.schedule, **schedule), spec=spec)
    layout = build_layout(
        stage.spec, Mesh(), 0, page_tokens=4, dtype="float64", columns=1 + spec.draft_tokens
    )
    storage = Storage(layout, 12, 4, torch.device("cpu"))
    return RankContext(
        config=config,
        setup=plan_pb2.Setup(),
        rank=0,
        spec=stage.spec,
        mesh=Mesh(),
        groups=solo_groups(),
        device=LaggingDevice(lag) if lag else CpuDevice(1),
        stage=stage,
        layout=layout,
        storage=storage,
        plans=plans,  # type: ignore[arg-type]
        mover=None,  # type: ignore[arg-type]
    )


def plan(
    step: int, *rows: int, opens: tuple[int, ...] = (), group_len: int = 1
) -> plan_pb2.FrontMessage:
    message = plan_pb2.StepPlan(step_id=step, group_len=group_len)
    for row in opens:
        message.open_rows.add(
            row=row,
            epoch=1,
            base=2,
            anchor=3 + row,
            pages=[3 * row, 3 * row + 1, 3 * row + 2],
            state_slot=row,
            sampling=common_pb2.SamplingParams(temperature=0),
            stop=common_pb2.StopParams(max_tokens=9),
            output_ids=[3 + row],
        )
    for row in rows:
        message.verify_rows.add(row=row, epoch=1, base_bound=2 + step)
    return plan_pb2.FrontMessage(plan=message)


SHUTDOWN = plan_pb2.FrontMessage(shutdown=plan_pb2.Shutdown())


def test_a_rank_warms_up_reports_ready_answers_plans_and_leaves(stage: Stage) -> None:
    plans = Plans([plan(1, 1, opens=(1,)), plan(2, 2, 1, opens=(2,)), SHUTDOWN])
    loop.run(context(stage, plans))
    kinds = [m.WhichOneof("message") for m in plans.sent]
    assert kinds == ["progress", "progress", "ready", "result", "result"]
    first, second = plans.results()
    assert [(r.row, r.epoch, len(r.tokens)) for r in first.rows] == [(1, 1, 1)]
    assert [r.row for r in second.rows] == [2, 1]
    assert first.step_s >= first.forward_s > 0


@pytest.mark.parametrize("lag", [3, 7, 50])
def test_a_lagging_device_gets_the_next_plan_before_the_answer(stage: Stage, lag: int) -> None:
    messages = [plan(1, 1, opens=(1,)), plan(2, 1), plan(3, 1), SHUTDOWN]
    direct = Plans(list(messages))
    loop.run(context(stage, direct))
    lagging = Plans(list(messages)[:3])
    with pytest.raises(EOFError):
        loop.run(context(stage, lagging, lag=lag))
    assert [r.step_id for r in lagging.results()] == [1, 2, 3]
    assert [t.rows[0].tokens[0].id for t in lagging.results()] == [
        t.rows[0].tokens[0].id for t in direct.results()
    ]
    assert direct.order[:4] == ["plan 1", "result 1", "plan 2", "result 2"]
    assert lagging.order[:2] == ["plan 1", "plan 2"]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (plan(3, 1, opens=(1,)), "plan 3 after plan 0"),
        (plan(1, 1, opens=(1,), group_len=2), "takes rows of group_len 1..1"),
        (plan(1, opens=(1,)), "0 verify rows"),
        (plan(1, 2, opens=(1,)), "row 2 epoch 1"),
        (plan_pb2.FrontMessage(setup=plan_pb2.Setup()), "got 'setup'"),
    ],
)
def test_plans_that_cannot_be_right_end_the_rank(
    stage: Stage, bad: plan_pb2.FrontMessage, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        loop.run(context(stage, Plans([bad])))


def test_a_front_that_overruns_the_depth_is_stopped(stage: Stage) -> None:
    plans = Plans([plan(1, 1, opens=(1,)), plan(2, 1), plan(3, 1)], depth=3)
    with pytest.raises(ValueError, match="depth=2"):
        loop.run(context(stage, plans, lag=50))


def test_a_front_that_is_gone_ends_the_rank(stage: Stage) -> None:
    with pytest.raises(EOFError):
        loop.run(context(stage, Plans([])))


@pytest.mark.dspark
def test_drafts_are_checked_once(stage: Stage) -> None:
    """Rows whose newest drafts were checked, or that never got any, check none, whatever the plan says."""
    rank = loop.DecodeRank(context(stage, Plans([]), spec=SpecConfig(draft_tokens=2)))
    checked: list[int] = []
    for step, (no_drafts, draft_len) in enumerate(
        [(True, 2), (False, 2), (False, 1), (True, 2), (False, 2), (False, 2)], 1
    ):
        message = plan(step, 1, opens=(1,) if step == 1 else (), group_len=3).plan
        message.no_drafts = no_drafts
        message.verify_rows[0].draft_len = draft_len
        for opened in message.open_rows:
            opened.draft_len = 2
        [row] = rank.answer(rank.launch(message)).rows
        checked.append(row.n_drafts)
    assert checked == [0, 0, 1, 2, 0, 2]


@pytest.mark.dspark
@pytest.mark.parametrize(("acceptance", "keeps"), [("match", False), ("block", True)])
def test_a_rule_that_weighs_drafts_keeps_what_they_were_drawn_from(
    stage: Stage, acceptance: str, keeps: bool
) -> None:
    spec = SpecConfig(draft_tokens=2, acceptance=acceptance)
    rank = loop.DecodeRank(context(stage, Plans([]), spec=spec))
    message = plan(1, 1, opens=(1,), group_len=3).plan
    message.open_rows[0].draft_len = 2
    message.open_rows[0].sampling.temperature = 0.8
    message.open_rows[0].sampling.top_p = 1.0
    assert len(rank.answer(rank.launch(message)).rows[0].tokens) >= 1
    kept = rank._table.proposal_RKV
    assert (kept is not None) == keeps
    assert kept is None or kept.dtype == torch.float64
