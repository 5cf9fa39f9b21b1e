"""The best drafts from left to right in one launch per slot, where the head has no state. Rules: `k3.model.dspark`.

A program owns some tokens of the vocabulary. It first finds the token before its slot from what all programs left of the
slot before, then adds that token's bias to its own logits and leaves the best of them.

Letters: B requests, K slots, V vocabulary, R rank of the head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.layers import DraftHead
from k3_kernels.triton.best import NOTHING, index_of, ranked
from k3_kernels.triton.products import weight_of

SMALL = 1 << 14  # tokens of a vocabulary that is cut into finer tiles


@triton.jit
def _best_of(best_ptr, n_tiles, TILES: tl.constexpr):
    """The token that is best over all programs."""
    tile = tl.arange(0, TILES)
    return index_of(tl.max(tl.load(best_ptr + tile, mask=tile < n_tiles, other=NOTHING), 0))


@triton.jit
def _slot(
    logits_ptr,
    table_ptr,
    out_ptr,
    anchor_ptr,
    before_ptr,
    best_ptr,
    drafts_ptr,
    n_rows,
    vocabulary,
    n_tiles,
    logits_row,
    drafts_row,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES: tl.constexpr,
    FIRST: tl.constexpr,
):
    tile = tl.program_id(0)
    token, r = tile * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    inside = token < vocabulary
    at = token.to(tl.int64)[:, None] * RANK + r[None, :]
    weight = tl.load(out_ptr + at, mask=inside[:, None] & (r < RANK)[None, :], other=0.0)
    for each in range(n_rows):
        row = tl.cast(each, tl.int64)  # logits may be more than 2^31
        if FIRST:
            previous = tl.load(anchor_ptr + row)
        else:
            previous = _best_of(before_ptr + row * n_tiles, n_tiles, TILES)
            if tile == 0:
                tl.store(drafts_ptr + row * drafts_row, previous)
        e = tl.load(table_ptr + previous * RANK + r, mask=r < RANK, other=0.0)
        line = logits_ptr + row * logits_row
        logits = tl.load(line + token, mask=inside, other=float("-inf"))
        value = logits + tl.sum(weight * e[None, :], 1)
        tl.store(best_ptr + row * n_tiles + tile, tl.max(ranked(value, token), 0))


@triton.jit
def _last(before_ptr, drafts_ptr, n_tiles, drafts_row, TILES: tl.constexpr):
    row = tl.program_id(0)
    token = _best_of(before_ptr + row * n_tiles, n_tiles, TILES)
    tl.store(drafts_ptr + row.to(tl.int64) * drafts_row, token)


class TritonDraftTokens:
    """`layers.DraftTokens` in float32."""

    def __init__(self, head: DraftHead) -> None:
        weight = weight_of(head.out)
        self._table, self._out = head.table_VR.contiguous(), weight.contiguous()
        assert self._table.dtype == self._out.dtype == torch.float32, self._table.dtype
        self._vocabulary, rank = self._out.shape
        block_r = triton.next_power_of_2(rank)
        self._block_v = 64 if self._vocabulary <= SMALL else 128
        self._n_tiles = triton.cdiv(self._vocabulary, self._block_v)
        self._shape = {
            "RANK": rank,
            "BLOCK_R": block_r,
            "BLOCK_V": self._block_v,
            "TILES": triton.next_power_of_2(self._n_tiles),
            "num_warps": 8 if self._block_v * block_r > 1 << 13 else 4,
        }

    def __call__(self, logits_BKV: Tensor, anchor_B: Tensor) -> Tensor:
        """[B, K] int64."""
        n_rows, n_slots, vocabulary = logits_BKV.shape
        assert vocabulary == self._vocabulary, f"{vocabulary} logits, {self._vocabulary} tokens"
        assert logits_BKV.dtype == torch.float32, logits_BKV.dtype
        assert logits_BKV.stride(2) == 1, f"logits: strides {logits_BKV.stride()}"
        anchor, n_tiles = anchor_B.contiguous(), self._n_tiles
        drafts = torch.empty(n_rows, n_slots, dtype=torch.int64, device=anchor.device)
        best = anchor.new_empty(2, n_rows, n_tiles)
        numbers = (n_rows, vocabulary, n_tiles, logits_BKV.stride(0), n_slots)
        for i in range(n_slots):
            tensors = (anchor, best[1 - i % 2], best[i % 2], drafts[:, max(i - 1, 0)])
            weights = (logits_BKV[:, i], self._table, self._out)
            _slot[(n_tiles,)](*weights, *tensors, *numbers, FIRST=i == 0, **self._shape)
        newest, last = best[(n_slots - 1) % 2], drafts[:, n_slots - 1]
        _last[(n_rows,)](newest, last, n_tiles, n_slots, TILES=self._shape["TILES"])
        return drafts
