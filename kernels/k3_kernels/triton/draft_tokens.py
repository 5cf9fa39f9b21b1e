"""The best drafts from left to right in two launches per slot, where the head has no state. Rules: `k3.model.dspark`.

A program owns some tokens of the vocabulary. It adds to their logits the biases of the tokens before some requests' slots
and leaves the best of each as one number (`best.py`); then the best of those is the draft. Where several ranks share the vocabulary,
they exchange such numbers between the two.

Letters: B requests, K slots, V vocabulary, R rank of the head, P tiles of the vocabulary, of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.layers import ALL, DraftHead, Slices
from k3_kernels.triton.best import NOTHING, index_of, ranked
from k3_kernels.triton.products import weight_of
from k3_kernels.triton.tf32 import product

SMALL = 1 << 14  # tokens of a vocabulary that is cut into finer tiles
ROWS = 16  # of a program
STEP = 64  # along the rank, at most


@triton.jit
def _slot(
    logits_ptr,
    table_ptr,
    out_ptr,
    previous_ptr,
    best_ptr,
    n_rows,
    vocabulary,
    first,
    logits_row,
    previous_row,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    tile = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    known, inside = row < n_rows, token < vocabulary
    previous = tl.load(previous_ptr + row * previous_row, mask=known, other=0)
    out_row = out_ptr + token.to(tl.int64)[:, None] * RANK
    table_row = table_ptr + previous[:, None] * RANK
    bias = tl.zeros([BLOCK_V, ROWS], dtype=tl.float32)
    for start in range(0, RANK, STEP):
        r = start + tl.arange(0, STEP)[None, :]
        weight = tl.load(out_row + r, mask=inside[:, None] & (r < RANK), other=0.0)
        e = tl.load(table_row + r, mask=known[:, None] & (r < RANK), other=0.0)
        bias += product(weight, tl.trans(e))
    at = logits_ptr + row[:, None] * logits_row + token[None, :]
    asked = known[:, None] & inside[None, :]
    logits = tl.load(at, mask=asked, other=float("-inf")).to(tl.float32)
    best = tl.max(ranked(logits + tl.trans(bias), first + token[None, :]), 1)
    tl.store(best_ptr + row * tl.num_programs(1) + tile, best, mask=known)


@triton.jit
def _draft(best_ptr, drafts_ptr, n_tiles, drafts_row, TILES: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    best = tl.load(best_ptr + row * n_tiles + tile, mask=tile < n_tiles, other=NOTHING)
    tl.store(drafts_ptr + row * drafts_row, index_of(tl.max(best, 0)))


@dataclass(frozen=True, slots=True)
class TritonDraftTokens:
    """`layers.DraftTokens` in float32."""

    head: DraftHead
    slices: Slices = ALL

    def over(self, slices: Slices) -> TritonDraftTokens:
        """For logits of one slice."""
        return TritonDraftTokens(self.head, slices)

    def __call__(self, logits_BKV: Tensor, anchor_B: Tensor) -> Tensor:
        """[B, K] int64."""
        n_rows, n_slots, vocabulary = logits_BKV.shape
        assert logits_BKV.dtype != torch.float64, logits_BKV.dtype
        assert logits_BKV.stride(2) == 1, f"logits: strides {logits_BKV.stride()}"
        first = self.slices.first
        table, out = self.head.table_VR, weight_of(self.head.out)[first : first + vocabulary]
        assert table.dtype == out.dtype == torch.float32, table.dtype
        assert table.is_contiguous(), f"table: strides {table.stride()}"
        assert out.is_contiguous(), f"output: strides {out.stride()}"
        assert len(out) == vocabulary, f"{vocabulary} logits, {len(out)} tokens"
        step = min(STEP, max(16, triton.next_power_of_2(out.shape[1])))
        block_v = 64 if vocabulary <= SMALL else 128
        grid = (triton.cdiv(n_rows, ROWS), triton.cdiv(vocabulary, block_v))
        tile = {"ROWS": ROWS, "RANK": out.shape[1], "STEP": step, "BLOCK_V": block_v}
        drafts = torch.empty(n_rows, n_slots, dtype=torch.int64, device=anchor_B.device)
        previous_B = anchor_B
        for i in range(n_slots):
            best_BP = drafts.new_empty(n_rows, grid[1])
            _slot[grid](
                *(logits_BKV[:, i], table, out, previous_B, best_BP),
                *(n_rows, vocabulary, first, logits_BKV.stride(0), previous_B.stride(0)),
                **tile,
                num_warps=4,
            )
            best_BP = self.slices.gather(best_BP)
            n_tiles, previous_B = best_BP.shape[1], drafts[:, i]
            tiles = triton.next_power_of_2(n_tiles)
            _draft[(n_rows,)](best_BP, previous_B, n_tiles, n_slots, TILES=tiles)
        return drafts
