"""The batch of a verify step from the row table in one launch. Rules: `k3_kernels.reference.tables.verify_tables`.

A program is one row of the step. Letters: B rows, G group tokens, T = B * G, W page-table width, P tokens per page, C ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.drafts import GroupTables, RowSource


@triton.jit
def _derive(
    rows_ptr,
    limits_ptr,
    base_ptr,
    anchor_ptr,
    draft_len_ptr,
    column_ptr,
    drafts_ptr,
    pages_ptr,
    tokens_ptr,
    slot_ptr,
    bound_ptr,
    next_ptr,
    row_base_ptr,
    row_column_ptr,
    row_len_ptr,
    drafts_row,
    pages_row,
    width,
    cp_rank,
    G: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    b, g = tl.program_id(0), tl.arange(0, BLOCK_G)
    row = tl.load(rows_ptr + b)
    base = tl.load(base_ptr + row)
    length = tl.minimum(tl.load(draft_len_ptr + row), tl.load(limits_ptr + b))
    tl.store(row_base_ptr + b, base)
    tl.store(row_column_ptr + b, tl.load(column_ptr + row))
    tl.store(row_len_ptr + b, length)
    inside = g < G
    draft = tl.load(drafts_ptr + row * drafts_row + g - 1, mask=inside & (g > 0), other=0)
    token = tl.where(g == 0, tl.load(anchor_ptr + row), draft)
    is_real = (g <= length) & (row != 0)
    position = base + g
    block, offset = position // (P * C), position % (P * C)
    is_in_table = block < width
    at = pages_ptr + b * pages_row + block
    page = tl.load(at, mask=inside & is_in_table, other=-1).to(tl.int64)
    is_mine = (offset // P == cp_rank) & is_real & (page >= 0)
    n = position + 1
    local = tl.minimum(tl.maximum(n % (P * C) - cp_rank * P, 0), P) + n // (P * C) * P
    to = b * G + g
    tl.store(tokens_ptr + to, token, mask=inside)
    tl.store(slot_ptr + to, tl.where(is_mine, page * P + offset % P, -1), mask=inside)
    tl.store(bound_ptr + to, tl.where(is_real, local, 0).to(tl.int32), mask=inside)
    tl.store(next_ptr + to, n, mask=inside)


def derive(source: RowSource, to: GroupTables, group: int) -> None:
    """`drafts.DeriveTables`."""
    drafts = source.drafts_RK if source.drafts_RK.shape[1] else source.anchor_R.unsqueeze(1)
    _derive[(len(source.rows_B),)](
        *(source.rows_B, source.limits_B, source.base_R, source.anchor_R),
        *(source.draft_len_R, source.column_R, drafts, source.pages_BW),
        *(to.tokens_T, to.slot_T, to.bound_T, to.next_T, to.base_B, to.column_B, to.draft_len_B),
        *(drafts.stride(0), source.pages_BW.stride(0), source.pages_BW.shape[1]),
        source.cp_rank,
        G=group,
        P=source.page_tokens,
        C=source.cp_size,
        BLOCK_G=triton.next_power_of_2(group),
        num_warps=1,
    )
