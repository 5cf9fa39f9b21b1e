"""Merging partial attention results by their natural log-sum-exp, selecting before multiplying.

Two places need it: the pieces that `mla.attend` leaves, and the partial outputs of context ranks after their exchange.
A partial without keys has lse -inf and is never multiplied, whatever its output holds. Partials are brought in in
their order, so a result does not depend on which finished first.

Letters: R partials, T tokens, G group tokens, H heads, C value width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.triton.mla import parts_of


@triton.jit
def merge_parts(
    part_o,
    part_lse,
    line,
    o,
    lse,
    n_rows,
    n_parts,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    FEWEST: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One query: merges the pieces of its row; rows of one piece are finished, rows without keys get 0 and -inf."""
    query = tl.program_id(0)
    row = query // (G * H)
    m = query % (G * H)
    start = tl.load(line + row)
    end = tl.load(line + row + 1)
    total = tl.load(line + n_rows)
    used = parts_of(total, n_parts, FEWEST)
    c = tl.arange(0, BLOCK_C)
    to = o + query.to(tl.int64) * C + c
    if start == end:
        tl.store(to, tl.zeros((BLOCK_C,), o.dtype.element_ty), mask=c < C)
        tl.store(lse + query, float("-inf"))
    else:
        first = ((start + 1) * used - 1) // total
        last = (end * used - 1) // total
        if last > first:
            peak = float("-inf")
            weight = 0.0
            sum_C = tl.zeros((BLOCK_C,), tl.float32)
            for lo in tl.range(first, last + 1, AT_ONCE):
                part = lo + tl.arange(0, AT_ONCE)
                slot = 2 * part + tl.where(part == first, 1, 0)
                at = slot.to(tl.int64) * (G * H) + m
                lse_A = tl.load(part_lse + at, mask=part <= last, other=float("-inf"))
                some = lse_A > float("-inf")
                o_AC = tl.load(  # does not wait for the lse
                    part_o + at[:, None] * C + c[None, :],
                    mask=(part <= last)[:, None] & (c < C)[None, :],
                    other=0.0,
                )
                o_AC = tl.where(some[:, None], o_AC, 0.0)
                new = tl.maximum(peak, tl.max(lse_A, 0))
                shift = tl.where(new == float("-inf"), 0.0, new)
                fade = tl.exp(peak - shift)
                w_A = tl.exp(lse_A - shift)
                sum_C = sum_C * fade + tl.sum(o_AC * w_A[:, None], 0)
                weight = weight * fade + tl.sum(w_A, 0)
                peak = new
            safe = tl.where(weight == 0.0, 1.0, weight)
            tl.store(to, (sum_C / safe).to(o.dtype.element_ty), mask=c < C)
            tl.store(lse + query, peak + tl.log(weight))


@triton.jit
def _merge(
    o,
    lse,
    to_o,
    to_lse,
    n_queries,
    heads,
    o_r,
    o_t,
    o_h,
    lse_r,
    lse_t,
    lse_h,
    N_R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
):
    d = tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    for i in tl.static_range(QUERIES):
        query = tl.program_id(0) * QUERIES + i
        t, h = (query // heads).to(tl.int64), query % heads
        there = (r < N_R) & (query < n_queries)
        lse_R = tl.load(lse + r * lse_r + t * lse_t + h * lse_h, mask=there, other=float("-inf"))
        some = lse_R > float("-inf")
        at = r * o_r + t * o_t + h * o_h
        mask = there[:, None] & (d < D)[None, :]
        o_RD = tl.load(o + at[:, None] + d[None, :], mask=mask, other=0.0)  # beside the lse
        o_RD = tl.where(some[:, None], o_RD.to(tl.float32), 0.0)
        peak = tl.max(lse_R, 0)
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        w_R = tl.exp(lse_R - shift)
        total = tl.sum(w_R, 0)
        merged = tl.sum(o_RD * w_R[:, None], 0) / tl.where(total == 0.0, 1.0, total)
        to = to_o + query.to(tl.int64) * D + d
        tl.store(to, merged.to(to_o.dtype.element_ty), mask=(d < D) & (query < n_queries))
        tl.store(to_lse + query, shift + tl.log(total), mask=query < n_queries)


def merge(o_RTHD: Tensor, lse_RTH: Tensor, queries: int = 1) -> tuple[Tensor, Tensor]:
    """Union of partials: o [T, H, D] and lse [T, H] float32; any strides, so views of a packed message will do.

    Where no partial has a key: 0 and -inf. queries: (token, head) pairs of a program.
    """
    n_partials, n_tokens, heads, dim = o_RTHD.shape
    assert o_RTHD.stride(3) == 1, "a head's values are contiguous"
    to_o = torch.empty(n_tokens, heads, dim, dtype=o_RTHD.dtype, device=o_RTHD.device)
    to_lse = torch.empty(n_tokens, heads, dtype=torch.float32, device=o_RTHD.device)
    _merge[(triton.cdiv(n_tokens * heads, queries),)](
        o_RTHD,
        lse_RTH,
        to_o,
        to_lse,
        n_tokens * heads,
        heads,
        *o_RTHD.stride()[:3],
        *lse_RTH.stride(),
        N_R=n_partials,
        D=dim,
        BLOCK_R=triton.next_power_of_2(n_partials),
        BLOCK_D=triton.next_power_of_2(dim),
        QUERIES=queries,
        num_warps=2 if dim > 256 else 1,  # a thread holds a column of all partials
    )
    return to_o, to_lse
