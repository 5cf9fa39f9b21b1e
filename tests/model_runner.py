"""Drives a `Stage` over one or more sequences with its own pools, for tests of the model.

Pages are handed out in a shuffled order and pools start NaN-filled, so a read of a wrong or unwritten
place shows in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from k3_kernels.api import Backends, Ops, select
from k3_kernels.reference.tables import verify_tables
from torch import Tensor

from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.model.batch import ChunkBatch, VerifyBatch
from k3.model.k3 import Stage, StageOutput
from k3.model.registry import open_stage
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import SOLO

CPU = torch.device("cpu")
OPS = select(Backends(), CPU)


def solo_stage(
    folder: Path,
    dtype: str,
    moe_weights: str = "auto",
    taps: tuple[int, ...] = (),
    tap_stream: str = "prefix",
    ops: Ops = OPS,
    device: torch.device = CPU,
) -> Stage:
    """The whole model of `folder` on one rank. ops: of the device."""
    return open_stage(
        folder,
        SOLO,
        solo_groups(),
        ops,
        dtype=dtype,
        device=device,
        moe_weights=moe_weights,
        taps=taps,
        tap_stream=tap_stream,
    )


@dataclass
class Request:
    """One sequence's place: pages, state slot, tokens in the caches, column of the committed state."""

    pages: Tensor
    slot: int
    length: int = 0
    read_column: int = -1  # just filled
    ids: list[int] = field(default_factory=list)


class Pools:
    """Storage for several requests of at most `max_tokens` tokens each, on the stage's device."""

    def __init__(
        self,
        stage: Stage,
        n_requests: int,
        max_tokens: int,
        page_tokens: int = 4,
        columns: int = 1,
        seed: int = 0,
        records: int = 0,
    ) -> None:
        names = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
        width = -(-max_tokens // page_tokens)
        place = stage.place
        layout = build_layout(
            stage.spec,
            place.mesh,
            place.stage,
            page_tokens=page_tokens,
            dtype=names[stage.dtype],
            columns=columns,
            records=records,
        )
        self.stage, self.page_tokens = stage, page_tokens
        # one page and one slot more than needed: never handed out, they stay NaN
        self.storage = Storage(
            layout, n_requests * width + 1, n_requests + 1, stage.device, fill_nan=True
        )
        self.caches = self.storage.caches()
        order = torch.randperm(n_requests * width, generator=torch.Generator().manual_seed(seed))
        pages = order.to(stage.device, torch.int32).view(n_requests, width)
        self.requests = [Request(pages[i], n_requests - i) for i in range(n_requests)]

    def chunk_batch(self, chunks: Sequence[tuple[Request, Sequence[int]]]) -> ChunkBatch:
        """One chunk per request, continuing where each stands."""
        cu_lens, ids, slots = [0], list[int](), list[Tensor]()
        for request, tokens in chunks:
            cu_lens.append(cu_lens[-1] + len(tokens))
            ids += list(tokens)
            end = request.length + len(tokens)
            position = torch.arange(request.length, end, device=self.stage.device)
            page = request.pages[position // self.page_tokens].long()
            slots.append(page * self.page_tokens + position % self.page_tokens)
        return ChunkBatch(
            token_ids_T=torch.tensor(ids, device=self.stage.device),
            cu_lens=tuple(cu_lens),
            starts=tuple(request.length for request, _ in chunks),
            page_table_RW=torch.stack([request.pages for request, _ in chunks]),
            slot_T=torch.cat(slots),
            read_slots=tuple(r.slot if r.length else -1 for r, _ in chunks),
            write_slots=tuple(r.slot for r, _ in chunks),
        )

    def chunk(self, chunks: Sequence[tuple[Request, Sequence[int]]]) -> StageOutput:
        """Run one chunk step and advance the requests."""
        output = self.stage.forward(None, self.caches, self.chunk_batch(chunks))
        for request, tokens in chunks:
            request.length += len(tokens)
            request.ids += list(tokens)
            request.read_column = -1
        return output

    def prefill(self, request: Request, ids: Sequence[int], chunk: int) -> Tensor:
        """Logits of all positions, computed `chunk` tokens at a time."""
        rows = [
            self.logits(self.chunk([(request, ids[at : at + chunk])]))
            for at in range(0, len(ids), chunk)
        ]
        return torch.cat(rows)

    def verify_batch(self, groups: Sequence[tuple[Request, Sequence[int]]]) -> VerifyBatch:
        """One group per request at its current length; all groups equally wide."""
        group, device = len(groups[0][1]), self.stage.device
        base = torch.tensor([request.length for request, _ in groups], device=device)
        table = torch.stack([request.pages for request, _ in groups])
        valid = torch.ones(len(groups), group, dtype=torch.bool, device=device)
        _, slot, bound = verify_tables(base, table, valid, self.page_tokens, 1, 0)
        return VerifyBatch(
            token_ids_T=torch.tensor([t for _, tokens in groups for t in tokens], device=device),
            page_table_BW=table,
            slot_T=slot,
            bound_T=bound,
            state_slots_B=torch.tensor([request.slot for request, _ in groups], device=device),
            read_column_B=torch.tensor(
                [request.read_column for request, _ in groups], device=device
            ),
            group=group,
            max_bound=int(base.max()) + group,
        )

    def verify(
        self, groups: Sequence[tuple[Request, Sequence[int]]], accepted: Sequence[int]
    ) -> Tensor:
        """Run one verify step, keep the anchor and `accepted` drafts; logits [B, G, vocab]."""
        output = self.stage.forward(None, self.caches, self.verify_batch(groups))
        logits = self.logits(output).view(len(groups), len(groups[0][1]), -1)
        for (request, tokens), a in zip(groups, accepted, strict=True):
            request.length += a + 1
            request.ids += list(tokens[: a + 1])
            request.read_column = a
        return logits

    def logits(self, output: StageOutput) -> Tensor:
        """Logits of every row of the step."""
        return self.stage.logits(self.stage.hidden(output.frame))
