"""A greedy group judged in two launches: the best token after each of its tokens, then what the rows become.

Rules: `k3.acceptance.accept`, `decode_svc.rank.rows.RowTable.commit`. Nothing here waits for the host.

Letters: T = B * G tokens, B rows of a step, G group tokens, K = G - 1 drafts, V vocabulary, R rows of the table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.drafts import RowWords
from k3_kernels.triton.best import NOTHING, index_of, ranked

MOST = 1 << 12  # tokens of the vocabulary that are looked at together


@triton.jit
def _best(logits_ptr, best_ptr, vocabulary, logits_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], NOTHING, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(
            logits_ptr + row * logits_row + token, mask=token < vocabulary, other=float("-inf")
        )
        best = tl.maximum(best, ranked(value, token))
    tl.store(best_ptr + row, index_of(tl.max(best, 0)))


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
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, BLOCK_G)
    best = tl.load(best_ptr + b * G + g, mask=g < G, other=0)
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


def judge(
    logits_BGV: Tensor, drafts_BK: Tensor, draft_len_B: Tensor, rows_B: Tensor, words: RowWords
) -> Tensor:
    """`drafts.GreedyJudge`."""
    n_rows, group, vocabulary = logits_BGV.shape
    assert logits_BGV.dtype == torch.float32, logits_BGV.dtype
    assert logits_BGV.is_contiguous(), f"logits: strides {logits_BGV.stride()}"
    best = rows_B.new_empty(n_rows * group)
    drawn = rows_B.new_empty(n_rows, group + 1)
    block = min(MOST, triton.next_power_of_2(vocabulary))
    _best[(n_rows * group,)](logits_BGV, best, vocabulary, vocabulary, BLOCK=block, num_warps=8)
    drafts = drafts_BK if group > 1 else best  # without drafts nothing is read there
    rows = (words.start_B, words.base_R, words.anchor_R, words.column_R)
    _verdict[(n_rows,)](
        *(best, drafts, draft_len_B, rows_B, *rows, drawn),
        drafts.stride(0),
        G=group,
        BLOCK_G=triton.next_power_of_2(group),
        num_warps=1,
    )
    return drawn
