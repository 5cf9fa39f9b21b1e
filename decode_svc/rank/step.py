"""One verify step on one rank: tables, forward, judgement, new rows.

Every step is a verify group: the anchor and k drafts per row (k = 0 without a drafter: the group is the anchor). All
state between steps is the row table; nothing here waits for the host. `launch` returns at once with an `Outcome` that
is still on the device; `Outcome.answers` reads it.
Letters: B rows, G group tokens, T = B * G, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_svc.ledger import Ledger
from decode_svc.rank.drafting import Drafting
from decode_svc.rank.graphs import GraphRunner
from decode_svc.rank.rows import DUMMY_ROW, RowTable
from decode_svc.rank.tables import GroupBatch, TableBuffers
from k3.device import Device, Event
from k3.model.batch import StageCaches
from k3.model.k3 import Stage
from k3.sampling import Recipe, TokenCounts, accept, with_logprobs
from k3.types import TokenEvent
from k3.v1 import plan_pb2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step drew, on its way to the host.

    rows: of the requests, without padding. host_BX: staging memory that holds G drawn tokens and the accepted count of
    each row once `event` is complete; reused `depth` steps later.
    """

    rows: tuple[int, ...]
    recipe: Recipe
    host_BX: Tensor
    event: Event
    logits_TV: Tensor
    forward_s: float

    def answers(self) -> list[list[TokenEvent]]:
        """Per row the tokens emitted: accepted drafts and the bonus. Waits for the event, not for later steps."""
        self.event.synchronize()
        drawn = self.host_BX.tolist()
        emitted = [drawn[b][: drawn[b][-1] + 1] for b in range(len(self.rows))]
        events = [[TokenEvent(i) for i in ids] for ids in emitted]
        group = self.recipe.group
        for b in self.recipe.logprob_rows:
            ids, first = emitted[b], b * group
            logits = self.logits_TV[first : first + len(ids)]
            events[b] = with_logprobs(logits, ids, self.recipe.rows[b].logprobs.top)
        return events


class VerifyStep:
    """Runs steps of one stage; see the module's docstring."""

    def __init__(
        self,
        stage: Stage,
        caches: StageCaches,
        table: RowTable,
        ledger: Ledger,
        runner: GraphRunner,
        device: Device,
        *,
        max_rows: int,
        group: int,
        depth: int,
        drafting: Drafting | None = None,
    ) -> None:
        """depth: outcomes that may be unread at once. drafting: proposes drafts, where there is a drafter."""
        self._drafting = drafting
        self._stage = stage
        self._caches = caches
        self._table = table
        self._ledger = ledger
        self._runner = runner
        self.group = group
        place = stage.place
        self._buffers = TableBuffers(table, ledger, place.cp_rank, runner.bucket(max_rows), group)
        self._device = device
        shape = (runner.bucket(max_rows), group + 1)
        self._staging = deque(device.staging(*shape, dtype=torch.int64) for _ in range(depth))
        self._composition: tuple[int, tuple[int, ...]] | None = None
        self._recipe = Recipe((), group=group, device=table.device)

    def warm_up(self, bucket: int) -> None:
        """Run a bucket of dummy rows: no page is written, no request's state is touched."""
        self.launch((DUMMY_ROW,) * bucket, self.group)

    @torch.inference_mode()
    def launch(self, rows: Sequence[int], max_base: int) -> Outcome:
        """One group for each of `rows` (distinct). max_base: upper bound of every row's base.

        All ranks of the group launch the same steps; every rank takes rank 0's tokens, so rows cannot drift apart.
        """
        table, bucket = self._table, self._runner.bucket(len(rows))
        self._compose(tuple(rows), bucket)
        batch, logits, taps, forward_s = self._runner.run(
            bucket, lambda: self._forward(bucket, max_base + self.group)
        )
        counts = [table.counts(row) for row in rows]
        drawn_BX = self._stage.groups.shard.broadcast(self._judge(batch, logits, counts))
        drawn_BG, accepted_B = drawn_BX[:, :-1], drawn_BX[:, -1]
        bonus_B = drawn_BG.gather(1, accepted_B.unsqueeze(1)).squeeze(1)
        table.commit(batch.rows_B, batch.base_B, accepted_B, bonus_B)
        if self._drafting is not None:
            self._drafting.advance(
                batch.rows_B, batch.base_B, accepted_B, taps, max_base + self.group
            )
        for b, seen in enumerate(counts):
            if seen is not None:  # such rows have no drafts: one token
                seen.add(drawn_BG[b, :1])
        host_BX = self._staging[0][:bucket]
        self._staging.rotate(-1)
        host_BX.copy_(drawn_BX, non_blocking=True)
        return Outcome(tuple(rows), self._recipe, host_BX, self._device.record(), logits, forward_s)

    def _compose(self, rows: tuple[int, ...], bucket: int) -> None:
        """Prepare for a set of rows; free when it is that of the step before."""
        composition = (self._table.version, rows)
        if composition == self._composition:
            return
        padded = rows + (DUMMY_ROW,) * (bucket - len(rows))
        self._buffers.choose(padded)
        sampling = [self._table.sampling(row) for row in padded]
        self._recipe = Recipe(sampling, group=self.group, device=self._table.device)
        self._composition = composition

    def open(self, rows: Sequence[int], max_base: int) -> None:
        """Propose the first drafts of rows that were just opened. max_base: upper bound of their bases."""
        if self._drafting is not None:
            self._drafting.open(rows, max_base)

    def _forward(self, bucket: int, max_len: int) -> tuple[GroupBatch, Tensor, Tensor, float]:
        """The step's batch, its logits and taps, and the seconds the model took (of the launch, on a GPU)."""
        batch = self._buffers.derive(bucket, max_len)
        stage, started = self._stage, time.perf_counter()
        frame, taps = stage.forward(None, self._caches, batch.verify)
        logits = stage.logits(stage.hidden(frame))
        return batch, logits, taps, time.perf_counter() - started

    def _judge(
        self, batch: GroupBatch, logits_TV: Tensor, counts: Sequence[TokenCounts | None]
    ) -> Tensor:
        """Drawn tokens and accepted drafts of each row, [B, G + 1]; ranks other than 0 only make room for them."""
        n_rows = batch.rows_B.shape[0]
        if self._stage.groups.shard.rank != 0:
            return batch.rows_B.new_empty(n_rows, self.group + 1)
        drawn_BG = self._recipe.draw(logits_TV, batch.next_T, counts).view(n_rows, self.group)
        accepted_B = accept(drawn_BG, batch.drafts_BK, self._table.draft_len_R[batch.rows_B])
        return torch.cat((drawn_BG, accepted_B.unsqueeze(1)), 1)


def apply_rows(table: RowTable, plan: plan_pb2.StepPlan) -> None:
    """Closed rows first, then opened ones; then every row of the step must be of the epoch the front means."""
    for closed in plan.close_rows:
        table.close(closed.row, closed.epoch)
    for opened in plan.open_rows:
        table.open(opened)
    for row in plan.verify_rows:
        table.check_epoch(row.row, row.epoch)
