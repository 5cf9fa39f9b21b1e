"""A greedy group judged in two launches: the best token after each of its tokens, then what the rows become.

The first finds the best of every part of the vocabulary as one number (`best.py`), so that parts of several ranks are
as good as those of one. Rules: `k3.acceptance.accept`, `decode_svc.rank.rows.RowTable.commit`. Nothing here waits for
the host.

Letters: T = B * G tokens, B rows of a step, G group tokens, K = G - 1 drafts, V vocabulary, P parts, R rows of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.drafts import RowWords
from k3_kernels.layers import ALL, Slices
from k3_kernels.triton.best import NOTHING, index_of, ranked

PART = 1 << 12  # tokens of the vocabulary that are looked at together, at most


@triton.jit
def _best(logits_ptr, best_ptr, logits_row, vocabulary, first, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(
        logits_ptr + row * logits_row + token, mask=token < vocabulary, other=float("-inf")
    )
    best = tl.max(ranked(value.to(tl.float32), first + token), 0)
    tl.store(best_ptr + row * tl.num_programs(1) + part, best)


@triton.jit
def _verdict(
    best_ptr,
    drafts_ptr,
    draft_len_ptr,
    rows_ptr,
    start_ptr,
    base_ptr,
    anchor_ptr,
    column_ptr,
    drawn_ptr,
    drafts_row,
    parts,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    g, part = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_P)[None, :]
    at = best_ptr + (b * G + g)[:, None] * parts + part
    best = tl.load(at, mask=(g < G)[:, None] & (part < parts), other=NOTHING)
    best = index_of(tl.max(best, 1))
    draft = tl.load(drafts_ptr + b * drafts_row + g, mask=g < G - 1, other=-1)
    is_through = (best == draft) & (g < tl.load(draft_len_ptr + b)) & (g < G - 1)
    accepted = tl.min(tl.where(is_through, BLOCK_G, g), 0).to(tl.int64)
    accepted = tl.minimum(accepted, G - 1)
    tl.store(drawn_ptr + b * (G + 1) + g, best, mask=g < G)
    tl.store(drawn_ptr + b * (G + 1) + G, accepted)
    row, start = tl.load(rows_ptr + b), tl.load(start_ptr + b)
    # row 0 is nobody's, and several programs may have it
    tl.store(base_ptr + row, tl.where(row == 0, 0, start + accepted + 1))
    tl.store(column_ptr + row, accepted)
    tl.store(anchor_ptr + row, tl.sum(tl.where(g == accepted, best, 0), 0))


@dataclass(frozen=True, slots=True)
class Judge:
    """`drafts.GreedyJudge`."""

    slices: Slices = ALL

    def over(self, slices: Slices) -> Judge:
        """For logits of one slice."""
        return Judge(slices)

    def __call__(
        self,
        logits_BGV: Tensor,
        drafts_BK: Tensor,
        draft_len_B: Tensor,
        rows_B: Tensor,
        words: RowWords,
    ) -> Tensor:
        """[B, G + 1]."""
        n_rows, group, vocabulary = logits_BGV.shape
        assert logits_BGV.dtype != torch.float64, logits_BGV.dtype
        logits_TV = logits_BGV.flatten(0, 1)
        assert logits_TV.stride(1) == 1, f"logits: strides {logits_BGV.stride()}"
        block = min(PART, triton.next_power_of_2(vocabulary))
        best_TP = rows_B.new_empty(n_rows * group, triton.cdiv(vocabulary, block))
        _best[tuple(best_TP.shape)](
            *(logits_TV, best_TP, logits_TV.stride(0), vocabulary, self.slices.first),
            BLOCK=block,
            num_warps=4,
        )
        best_TP = self.slices.gather(best_TP)
        drawn = rows_B.new_empty(n_rows, group + 1)
        drafts = drafts_BK if group > 1 else best_TP  # without drafts nothing is read there
        rows = (words.start_B, words.base_R, words.anchor_R, words.column_R)
        parts = best_TP.shape[1]
        _verdict[(n_rows,)](
            *(best_TP, drafts, draft_len_B, rows_B, *rows, drawn),
            *(drafts.stride(0), parts),
            G=group,
            BLOCK_G=triton.next_power_of_2(group),
            BLOCK_P=triton.next_power_of_2(parts),
            num_warps=1,
        )
        return drawn


judge = Judge()
