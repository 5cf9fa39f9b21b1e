"""The decode rank's loop: one plan in, one step, one answer out, in order of `step_id`.

A device may run a step while the next plan arrives: a step is launched from the row table alone, and its answer goes
out when the device has it. On CPU a launched step is a finished one, so plan and answer alternate.
`k3/rank/main.py` calls `run` with everything built.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from torch import Tensor

from decode_svc.capacity import table_width
from decode_svc.depth import computes_prompts, plan_depth
from decode_svc.ledger import Ledger
from decode_svc.rank.chunks import ChunkSteps, LaunchedChunks
from decode_svc.rank.cuda_graphs import CudaGraphs, open_runner
from decode_svc.rank.drafting import Drafting
from decode_svc.rank.graphs import Eager, GraphRunner
from decode_svc.rank.outcome import Outcome
from decode_svc.rank.rows import DUMMY_SLOT, RowTable
from decode_svc.rank.stages import NextDrafts, Passed, RelayStep, place_rows
from decode_svc.rank.step import VerifyStep, apply_rows
from k3.config import speculation
from k3.device import Event
from k3.model.draft_ring import DraftRing
from k3.model.layers import wide
from k3.parallel.relay import Relay
from k3.rank.context import RankContext
from k3.rpc.convert import token_to_proto
from k3.v1 import plan_pb2

ANSWER_POLL_S = 50e-6  # a launched step is polled this often while no plan waits


@dataclass(frozen=True, slots=True)
class LaunchedGroups:
    """A step on its way."""

    plan: plan_pb2.StepPlan
    outcome: Outcome | Passed
    n_drafts: tuple[int, ...]  # checked of each row that is judged
    next_drafts: Tensor | None  # of every row, over stages; staged like the outcome
    event: Event  # behind all of it
    received_s: float


Launched = LaunchedGroups | LaunchedChunks


class DecodeRank:
    """Executes plans over a context; separate from the connection, so that a test can drive it."""

    def __init__(self, context: RankContext, runner: GraphRunner | None = None) -> None:
        """runner: how steps are launched; by default as `backends.graphs` says. Raises ConfigError when it cannot."""
        config, spec = context.config, context.spec
        ledger = Ledger(config.cache.page_tokens, context.mesh.cp)
        max_len = config.model.max_model_len or spec.max_position_embeddings
        depth = plan_depth(config)
        in_flight = depth.per_row - 1
        width = table_width(ledger, max_len, config.spec.draft_tokens, in_flight)
        max_rows = config.schedule.max_rows
        device = context.stage.device
        self._context = context
        drafting = config.spec.draft_tokens > 0
        acceptance = config.spec.acceptance if drafting else "match"
        self._table = RowTable(
            max_rows,
            width,
            config.spec.draft_tokens,
            spec.vocab_size,
            device,
            proposals=None if acceptance == "match" else wide(context.stage.dtype),
            confident=speculation.is_by_confidence(config),
        )
        self.runner = runner = runner or open_runner(context)
        relay = _relay(context)
        self._step, self._next = self._make_step(ledger, acceptance, depth.steps, runner, relay)
        self._chunks = None
        if computes_prompts(config):
            self._chunks = ChunkSteps(context, _ring(context), relay)
        self._max_rows = max_rows
        self._last_step = 0
        self._drafted: set[int] = set()  # rows with drafts that no step has looked at

    def _make_step(
        self,
        ledger: Ledger,
        acceptance: str,
        depth: int,
        runner: GraphRunner,
        relay: Relay | None,
    ) -> tuple[VerifyStep | RelayStep, NextDrafts | None]:
        """How this rank's stage runs steps, and what it sends the front for the next ones."""
        context, table = self._context, self._table
        stage, config = context.stage, context.config
        caches, max_rows = context.storage.caches(), config.schedule.max_rows
        group, is_staged = 1 + config.spec.draft_tokens, context.mesh.pp > 1
        if is_staged and not isinstance(runner, Eager):
            raise ValueError(
                "steps over stages cannot be recorded: their frames lie elsewhere each time"
            )
        if relay is not None and not stage.place.is_last:
            step = RelayStep(
                stage,
                caches,
                table,
                ledger,
                relay,
                context.device,
                max_rows=max_rows,
                group=group,
            )
            return step, None
        step = VerifyStep(
            stage,
            caches,
            table,
            ledger,
            runner,
            context.device,
            max_rows=max_rows,
            group=group,
            depth=depth,
            drafting=_drafting(context, table),
            acceptance=acceptance,
            relay=relay,
        )
        if not is_staged or group == 1:
            return step, None
        return step, NextDrafts(table, context.device, max_rows=max_rows, depth=depth)

    def warm_up(self) -> None:
        """Touch every kernel on the dummy row, and record the ordinary steps, before the first request."""
        self._context.storage.zero_slot(DUMMY_SLOT)
        if self._chunks is not None:
            self._chunks.warm_up()
        for bucket in (1, self._max_rows):
            self._step.warm_up(bucket)
            self._report("warm-up", bucket, self._max_rows)
        if isinstance(self.runner, CudaGraphs):
            assert isinstance(self._step, VerifyStep), "only steps of one stage are recorded"
            report = partial(self._report, "graphs")
            self.runner.record(self._context.config, self._step.prepare, report)

    def _report(self, stage: str, done: int, total: int) -> None:
        progress = plan_pb2.LoadProgress(stage=stage, done=done, total=total)
        self._context.plans.send(plan_pb2.RankMessage(progress=progress))

    def launch(self, plan: plan_pb2.StepPlan) -> Launched:
        """Start a step. Raises ValueError for a plan out of order or of another group length."""
        received_s = time.perf_counter()
        if plan.step_id != self._last_step + 1:
            raise ValueError(
                f"plan {plan.step_id} after plan {self._last_step}: plans must be dense"
            )
        if plan.chunks and self._chunks is not None and not plan.verify_rows:
            self._last_step = plan.step_id
            return self._chunks.launch(plan, received_s)
        fits = 1 <= plan.group_len <= self._step.group
        if not fits or plan.chunks or not plan.verify_rows:
            raise ValueError(
                f"plan {plan.step_id}: group_len={plan.group_len} with {len(plan.chunks)} chunks and "
                f"{len(plan.verify_rows)} verify rows; a decode rank takes rows of group_len 1..{self._step.group}"
            )
        self._last_step = plan.step_id
        apply_rows(self._table, plan)
        place_rows(self._table, plan.verify_rows)
        if self._chunks is not None:
            self._chunks.open(plan.open_rows)
        drafting = [row for row in plan.open_rows if row.draft_len and not plan.no_drafts]
        self._drafted.difference_update(row.row for row in plan.open_rows)
        self._drafted.update(row.row for row in drafting)
        self._step.open(
            [row.row for row in drafting], max((row.base for row in drafting), default=0)
        )
        judged = [row for row in plan.verify_rows if not row.opens]
        n_drafts = tuple(self._n_drafts(row, plan.group_len - 1) for row in judged)
        outcome = self._run(plan, judged, n_drafts)
        next_drafts = None
        if self._next is not None and not plan.no_drafts:
            next_drafts = self._next.stage([row.row for row in plan.verify_rows])
        seen = {row.row for row in judged}
        self._drafted = self._drafted - seen if plan.no_drafts else self._drafted | seen
        event = self._context.device.record()
        return LaunchedGroups(plan, outcome, n_drafts, next_drafts, event, received_s)

    def _run(
        self, plan: plan_pb2.StepPlan, judged: list[plan_pb2.VerifyRow], n_drafts: tuple[int, ...]
    ) -> Outcome | Passed:
        """The verify groups of a plan; one that only opens rows has none."""
        if not judged:
            return Passed(self._context.device.record(), 0.0)
        return self._step.launch(
            [row.row for row in judged],
            max(row.base_bound for row in judged),
            n_drafts,
            group=plan.group_len,
            proposes=not plan.no_drafts,
        )

    def _n_drafts(self, row: plan_pb2.VerifyRow, room: int) -> int:
        """Drafts of the row that this plan checks, at most `room`; the rest of its group is padding.

        Drafts are checked once: of older ones it is known what became of them, which the rules that weigh drafts by
        their probability must not be told.
        """
        if row.row not in self._drafted:
            return 0
        most = min(room, self._table.n_drafts(row.row))
        return min(row.draft_len, most) if row.HasField("draft_len") else most

    def answer(self, launched: Launched) -> plan_pb2.StepResult:
        """The acknowledgement of a step; waits for the device."""
        if isinstance(launched, LaunchedChunks):
            return launched.answer()
        result = plan_pb2.StepResult(step_id=launched.plan.step_id)
        entries = [
            result.rows.add(row=row.row, epoch=row.epoch) for row in launched.plan.verify_rows
        ]
        judged = [
            entry
            for entry, row in zip(entries, launched.plan.verify_rows, strict=True)
            if not row.opens
        ]
        if isinstance(launched.outcome, Outcome):
            answers = zip(
                judged,
                launched.n_drafts,
                launched.outcome.answers(),
                launched.outcome.confidence(),
                strict=True,
            )
            for entry, n_drafts, tokens, confidence in answers:
                entry.tokens.extend([token_to_proto(token) for token in tokens])
                entry.n_drafts = n_drafts
                entry.confidence.extend(confidence)
        if launched.next_drafts is not None:
            launched.event.synchronize()
            for entry, drafts in zip(entries, launched.next_drafts.tolist(), strict=True):
                entry.next_drafts.extend(drafts)
        result.step_s = time.perf_counter() - launched.received_s
        result.forward_s = launched.outcome.forward_s
        return result


def run(context: RankContext) -> None:
    """Warm up, report ready, execute plans until Shutdown. Raises EOFError when the front is gone."""
    rank = DecodeRank(context)
    rank.warm_up()
    context.plans.send(plan_pb2.RankMessage(ready=plan_pb2.RankReady()))
    place = context.stage.place
    answers = place.is_last and place.shard.index == 0  # one acknowledgement per plan for the group
    limits = plan_depth(context.config)
    depth = limits.steps + limits.prompts
    pending: deque[Launched] = deque()
    while True:
        messages = _next_messages(context, pending)
        for message in messages:
            match message.WhichOneof("message"):
                case "plan":
                    if len(pending) >= depth:
                        if answers:
                            raise ValueError(
                                f"plan {message.plan.step_id} with {len(pending)} unanswered: depth={depth}"
                            )
                        pending.popleft().event.synchronize()  # another rank has answered it
                    pending.append(rank.launch(message.plan))
                case "shutdown":
                    return
                case "setup" | None:
                    raise ValueError(f"a running rank got {message.WhichOneof('message')!r}")
                case other:
                    assert_never(other)
        while pending and (pending[0].event.query() or not messages):
            oldest = pending.popleft()
            if answers:
                context.plans.send(plan_pb2.RankMessage(result=rank.answer(oldest)))
            else:
                oldest.event.synchronize()


def _relay(context: RankContext) -> Relay | None:
    """The way of all frames, over stages."""
    stage = context.stage
    if context.mesh.pp == 1:
        return None
    pipeline = stage.groups.pipeline
    return Relay(pipeline, stage.place, stage.in_layout, stage.dtype, stage.device)


def _ring(context: RankContext) -> DraftRing | None:
    pool, config = context.storage.draft, context.config
    if context.drafter is None or pool is None:
        return None
    return DraftRing(pool, speculation.places(config, context.spec), config.spec.draft_window)


def _drafting(context: RankContext, table: RowTable) -> Drafting | None:
    ring = _ring(context)
    if context.drafter is None or ring is None:
        return None
    return Drafting(context.drafter, ring, table)


def _next_messages(context: RankContext, pending: deque[Launched]) -> list[plan_pb2.FrontMessage]:
    """What the front says; with steps on the device only until the oldest of them is done (then empty)."""
    if not pending:
        return [context.plans.receive()]
    while not pending[0].event.query():
        messages = context.plans.receive_ready()
        if messages:
            return messages
        time.sleep(ANSWER_POLL_S)
    return []
