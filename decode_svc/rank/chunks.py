"""Chunks of prompts on a decode rank: they write the caches that its rows go on from.

Context rows of the drafter go straight into the ring of the request's state slot; behind a prefix cache they go into
the pages, where other prompts find them, and are copied into the ring when the row opens. Frames pass through the same
line of stages as those of verify groups, in the order of the plans.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from k3.device import Event, uploaded
from k3.model.draft_ring import DraftRing
from k3.parallel.relay import Relay
from k3.rank.context import RankContext
from k3.v1 import plan_pb2
from prefill_svc.chunk_rows import stage_chunk, step_result
from prefill_svc.core.stage import ChunkStage, StageChunk, StageStep

WARM_UP_STEP = 0
WARM_UP_PAGE, WARM_UP_SLOT = 0, 0  # the page is handed out later, the slot never


@dataclass(frozen=True, slots=True)
class LaunchedChunks:
    """A step of chunks; what it drew is on the host already."""

    plan: plan_pb2.StepPlan
    step: StageStep
    event: Event
    received_s: float

    def answer(self) -> plan_pb2.StepResult:
        """The acknowledgement, on the rank that answers."""
        return step_result(self.plan, self.step, time.perf_counter() - self.received_s)


class ChunkSteps:
    """Runs plans of chunks. ring: of the drafter, on the last stage."""

    def __init__(self, context: RankContext, ring: DraftRing | None, relay: Relay | None) -> None:
        self._context, self._ring = context, ring
        self._pages = context.storage.draft_pages
        drafter = context.drafter
        self._stage = ChunkStage(
            context.stage,
            context.storage,
            context.layout.page_tokens,
            None if drafter is None else drafter.context,
            draft_ring=ring if self._pages is None else None,
            relay=relay,
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """One page of tokens through the whole group, before the first page is handed out."""
        storage, budget = self._context.storage, self._context.config.schedule.token_budget
        ids = (0,) * min(self._context.layout.page_tokens, budget)
        chunk = StageChunk(0, ids, (WARM_UP_PAGE,), read_slot=-1, write_slot=WARM_UP_SLOT)
        self._stage.run(WARM_UP_STEP, [chunk], lambda: None)
        self._context.device.synchronize()
        storage.zero_tail(WARM_UP_PAGE, 0)
        storage.zero_slot(WARM_UP_SLOT)

    @torch.inference_mode()
    def launch(self, plan: plan_pb2.StepPlan, received_s: float) -> LaunchedChunks:
        """Run the chunks of a plan."""
        chunks = [stage_chunk(row) for row in plan.chunks]
        step = self._stage.run(plan.step_id, chunks, lambda: None)
        return LaunchedChunks(plan, step, self._context.device.record(), received_s)

    @torch.inference_mode()
    def open(self, rows: Iterable[plan_pb2.OpenRow]) -> None:
        """Bring the context rows of opened rows from their pages into their rings, as many as are ever read."""
        ring, pages = self._ring, self._pages
        if ring is None or pages is None:
            return
        p, q = ring.page_tokens, ring.places
        for row in rows:
            if not row.draft_valid:
                continue
            oldest, end = max(0, row.base - ring.window) // p, -(-row.base // p)
            source = uploaded(torch.tensor(row.pages[oldest:end]), pages.device)
            places = torch.arange(oldest, end, device=pages.device) % q + row.draft_slot * q
            ring.pool[places] = pages[source]
