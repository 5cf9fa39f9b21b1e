"""Latent attention of verify groups over a paged cache: split over keys, bounded per token, merged in fixed order.

All keys of all rows form one line of tiles; `n_parts` programs per block of queries take equal pieces of it, so rows of
any lengths fill the GPU evenly and blocks of queries of the same keys run beside each other and share the L2. A row
within one piece is finished there; pieces of a row leave partial results that `combine.merge_parts` merges in the
order of the keys: the result is the same in every run. Lengths, pieces and bounds are read on the device: a captured
step stays right when they change.

Letters: T tokens, B rows, G group tokens, H heads, K = C + R, W pages of a row, P tokens a page, M queries of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3_kernels.triton.mla_tiles import keys_first, queries_first

UNIT = 64  # keys of one step of the line of tiles


@triton.jit
def schedule(
    bound,
    line,
    length,
    n_rows,
    G: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """`length`: keys anybody of a row's group sees; `line` [B + 1]: steps before each row."""
    row = tl.arange(0, BLOCK_B)
    token = tl.arange(0, BLOCK_G)
    here = (row < n_rows)[:, None] & (token < G)[None, :]
    at = bound + row[:, None] * G + token[None, :]
    most = tl.max(tl.load(at, mask=here, other=0), 1)
    steps = (most + UNIT - 1) // UNIT
    tl.store(length + row, most, mask=row < n_rows)
    tl.store(line + 1 + row, tl.cumsum(steps, 0), mask=row < n_rows)
    tl.store(line, 0)


@triton.jit
def parts_of(total, n_parts, FEWEST: tl.constexpr):
    """How many pieces the line is cut into: no piece shorter than FEWEST steps."""
    return tl.minimum(n_parts, tl.maximum(total // FEWEST, 1))


@triton.jit
def attend(
    q,
    cache,
    page_table,
    bound,
    line,
    length,
    o,
    lse,
    part_o,
    part_lse,
    scale,
    n_rows,
    n_parts,
    page_stride,
    table_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    FEWEST: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One piece of the line for one block of queries. scale includes log2(e); lse comes out natural."""
    block = tl.program_id(0)
    part = tl.program_id(1)
    total = tl.load(line + n_rows)
    used = parts_of(total, n_parts, FEWEST)
    at = part * total // used
    end = (part + 1) * total // used
    if part >= used:
        at = end
    rows = tl.arange(0, BLOCK_B)
    ends = tl.load(line + 1 + rows, mask=rows < n_rows, other=2147483647)
    row = tl.sum((ends <= at).to(tl.int32), 0)

    m = block * M + tl.arange(0, M)
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    real = m < G * H
    token = tl.minimum(m // H, G - 1)
    while at < end:
        start = tl.load(line + row)
        steps = tl.load(line + row + 1) - start
        n_keys = tl.load(length + row)
        first = at - start
        last = tl.minimum(end - start, steps)
        if last > first:
            bound_M = tl.load(bound + row * G + token)
            q_at = q + (row.to(tl.int64) * (G * H) + m) * (C + R)
            mask_C = real[:, None] & (c < C)[None, :]
            q_MC = tl.load(q_at[:, None] + c[None, :], mask=mask_C, other=0.0)
            q_MR = tl.load(
                q_at[:, None] + C + r[None, :], mask=real[:, None] & (r < R)[None, :], other=0.0
            )
            peak_M = tl.full((M,), float("-inf"), tl.float32)
            sum_M = tl.zeros((M,), tl.float32)
            pages = page_table + row * table_stride
            head = first * (UNIT // N)
            tail = tl.minimum(last * (UNIT // N), tl.cdiv(n_keys, N))
            if KEYS_FIRST:
                o_CM = tl.zeros((BLOCK_C, M), tl.float32)
                o_CM, peak_M, sum_M = keys_first(
                    q_MC, q_MR, o_CM, peak_M, sum_M, cache, pages, page_stride, head, tail, n_keys,
                    bound_M, scale, P, N, C, R, BLOCK_C, BLOCK_R, STAGES,
                )  # fmt: skip
                o_MC = tl.trans(o_CM)
            else:
                o_MC = tl.zeros((M, BLOCK_C), tl.float32)
                o_MC, peak_M, sum_M = queries_first(
                    q_MC, q_MR, o_MC, peak_M, sum_M, cache, pages, page_stride, head, tail, n_keys,
                    bound_M, scale, P, N, C, R, BLOCK_C, BLOCK_R, STAGES,
                )  # fmt: skip
            o_MC = o_MC * (1.0 / tl.where(sum_M == 0.0, 1.0, sum_M))[:, None]
            lse_M = (peak_M + tl.log2(sum_M)) * 0.6931471805599453  # -inf without keys
            if (first == 0) & (last == steps):  # the whole row
                to = row.to(tl.int64) * (G * H) + m
                tl.store(o + to[:, None] * C + c[None, :], o_MC.to(o.dtype.element_ty), mask=mask_C)
                tl.store(lse + to, lse_M, mask=real)
            else:  # slot 0 continues the piece before, slot 1 is continued by the piece after
                slot = 2 * part + tl.where(first == 0, 1, 0)
                to = slot.to(tl.int64) * (G * H) + m
                tl.store(part_o + to[:, None] * C + c[None, :], o_MC, mask=mask_C)
                tl.store(part_lse + to, lse_M, mask=real)
        at = start + last
        row += 1
