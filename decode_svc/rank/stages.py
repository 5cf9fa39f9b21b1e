"""Decode over pipeline stages: what a rank does differently when its stage is one of several.

Only the last stage judges, so plans bring the state of every row and each rank overwrites its row table with it before
the step. All stages but the last run their layers and hand the frame on (`RelayStep`); the last one answers, with the
drafts of the next groups among the results (`NextDrafts`). Steps run as they come: a frame lies elsewhere each time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_svc.ledger import Ledger
from decode_svc.rank.rows import DUMMY_ROW, RowTable
from decode_svc.rank.tables import TableBuffers
from k3.device import Device, Event
from k3.model.batch import StageCaches
from k3.model.k3 import Stage
from k3.parallel.relay import Relay
from k3.v1 import plan_pb2


def place_rows(table: RowTable, rows: Sequence[plan_pb2.VerifyRow]) -> None:
    """Overwrite rows of the table with the states that a plan brings."""
    placed = [row for row in rows if row.HasField("state")]
    if not placed:
        return
    k = table.drafts_RK.shape[1]
    words, drafts = list[tuple[int, ...]](), list[list[int]]()
    for row in placed:
        state = row.state
        words.append((row.row, state.base, state.anchor, state.read_column))
        drafts.append([*state.draft_ids, *[0] * (k - len(state.draft_ids))])
    rows_B, base_B, anchor_B, column_B = torch.tensor(words, device=table.device).unbind(1)
    table.base_R[rows_B] = base_B
    table.anchor_R[rows_B] = anchor_B
    table.read_column_R[rows_B] = column_B
    table.drafts_RK[rows_B] = torch.tensor(drafts, dtype=torch.int64, device=table.device)


@dataclass(frozen=True, slots=True)
class Passed:
    """A step of a stage that is not the last: nothing is drawn here."""

    event: Event
    forward_s: float


class RelayStep:
    """Runs steps of a stage that is not the last."""

    def __init__(
        self,
        stage: Stage,
        caches: StageCaches,
        table: RowTable,
        ledger: Ledger,
        relay: Relay,
        device: Device,
        *,
        max_rows: int,
        group: int,
    ) -> None:
        """group: tokens of the widest verify group."""
        self._stage, self._caches, self._relay, self._device = stage, caches, relay, device
        self._buffers = TableBuffers(table, ledger, stage.place.cp_rank, max_rows, group)
        self._n_steps = 0
        self.group = group

    def warm_up(self, n_rows: int) -> None:
        """Run dummy rows: no page is written, no request's state is touched."""
        self.launch((DUMMY_ROW,) * n_rows, self.group)

    def open(self, rows: Sequence[int], max_base: int) -> None:
        """Nothing: the drafter is on the last stage."""

    @torch.inference_mode()
    def launch(
        self,
        rows: Sequence[int],
        max_base: int,
        limits: Sequence[int] | None = None,
        *,
        group: int | None = None,
        proposes: bool = True,
    ) -> Passed:
        """One group for each of `rows` through this stage's layers. Arguments as those of `VerifyStep.launch`."""
        self._n_steps += 1
        group = group or self.group
        self._buffers.choose(rows, limits)
        batch = self._buffers.derive(len(rows), max_base + self.group, group).verify
        incoming = self._relay.receive(self._n_steps, batch.n_tokens)
        started = time.perf_counter()
        frame, _taps = self._stage.forward(incoming, self._caches, batch)
        forward_s = time.perf_counter() - started
        self._relay.send(self._n_steps, frame)
        return Passed(self._device.record(), forward_s)


class NextDrafts:
    """Drafts of the rows' next groups on their way to the host, as `depth` steps may be unread."""

    def __init__(self, table: RowTable, device: Device, *, max_rows: int, depth: int) -> None:
        self._table = table
        n_drafts = table.drafts_RK.shape[1]
        self._staging = deque(
            device.staging(max_rows, n_drafts, dtype=torch.int64) for _ in range(depth)
        )

    def stage(self, rows: Sequence[int]) -> Tensor:
        """[B, K] in staging memory, complete with the device's next event; reused `depth` steps later."""
        host = self._staging[0][: len(rows)]
        self._staging.rotate(-1)
        rows_B = torch.tensor(list(rows), dtype=torch.int64, device=self._table.device)
        host.copy_(self._table.drafts_RK[rows_B], non_blocking=True)
        return host
