"""`mla.attend` for Hopper and blocks of 64 queries: two warp groups that never wait for each other, and one warp that copies.

Each group computes all scores of the block, which spares them every exchange, and the products with its half of the
values. So one group's softmax runs beside the other's products, and P stays in registers. The third partition keeps
two tiles coming through the copy engine; a row's last, partly filled tile it copies itself, with zeros behind the keys.

Barriers, per place: `ready` (tile or queries arrived), `free` (both groups are done). C is 512, R is 64; otherwise as
`mla_hopper`.  Letters: M queries of a block, N keys of a tile, D half of the latent width, R shared key dims.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_everybody = vars(gl).get("barrier") or gl.thread_barrier  # its name until triton 3.6
TILE, HALF, SHARED = 64, 256, 64


def descriptors(rows: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """A matrix of latent rows for the copy engine: blocks of half a latent and of the shared part."""
    layout = gl.NVMMASharedLayout(128, 16)
    return (
        TensorDescriptor.from_tensor(rows, [TILE, HALF], layout),
        TensorDescriptor.from_tensor(rows, [TILE, SHARED], layout),
    )


@gluon.jit
def _piece(line, n_rows, n_parts, BLOCK_B: gl.constexpr, FEWEST: gl.constexpr, W: gl.constexpr):
    """First and last step of this program, and the row of the first."""
    rows = gl.arange(0, BLOCK_B, layout=gl.BlockedLayout([1], [32], [W], [0]))
    ends = gl.load(line + 1 + rows, mask=rows < n_rows, other=2147483647)
    part = gl.program_id(1)
    total = gl.load(line + n_rows)
    used = gl.minimum(n_parts, gl.maximum(total // FEWEST, 1))  # as mla.parts_of
    at = part * total // used
    end = (part + 1) * total // used
    if part >= used:
        at = end
    return at, end, gl.sum((ends <= at).to(gl.int32), 0)


@gluon.jit
def _copy_block(latent, shared, row, lo, hi, rest, bar, D: gl.constexpr):
    tma.async_copy_global_to_shared(latent, [row, 0], bar, lo)
    tma.async_copy_global_to_shared(latent, [row, D], bar, hi)
    tma.async_copy_global_to_shared(shared, [row, 2 * D], bar, rest)


@gluon.jit
def _copy_columns(to, base, n_valid, first: gl.constexpr, count: gl.constexpr, K: gl.constexpr):
    lanes: gl.constexpr = 32 if count >= 256 else count // 8
    by: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [1, 1], [1, 0])
    n = gl.arange(0, to.shape[0], layout=gl.SliceLayout(1, by))
    c = gl.arange(0, count, layout=gl.SliceLayout(0, by))
    at = base + n[:, None] * K + (first + c)[None, :]
    async_copy.async_copy_global_to_shared(to, at, mask=(n < n_valid)[:, None])


@gluon.jit
def _copies(
    tensors,
    places,
    scalars,
    H: gl.constexpr,
    G: gl.constexpr,
    P: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
    BLOCK_B: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    FEWEST: gl.constexpr,
):
    """The copying warp: a row's queries, then its tiles."""
    cache, latents, shareds, q_latents, q_shareds, page_table, line, length = tensors
    q_lo, q_hi, q_r, k_lo, k_hi, k_r, q_ready, q_free, ready, free = places
    n_rows, n_parts, page_stride, table_stride = scalars
    K: gl.constexpr = 2 * D + R
    at, end, row = _piece(line, n_rows, n_parts, BLOCK_B, FEWEST, 1)
    page_rows = (page_stride // K).to(gl.int32)
    turn = 0
    row_turn = 0
    while at < end:
        start = gl.load(line + row)
        steps = gl.load(line + row + 1) - start
        n_keys = gl.load(length + row)
        first = at - start
        last = gl.minimum(end - start, steps)
        if last > first:
            mbarrier.wait(q_free, (row_turn % 2) ^ 1)
            mbarrier.expect(q_ready, M * K * 2)
            _copy_block(
                q_latents,
                q_shareds,
                row * (G * H) + gl.program_id(0) * M,
                q_lo,
                q_hi,
                q_r,
                q_ready,
                D,
            )
            row_turn += 1
            pages = page_table + row * table_stride
            page = gl.load(pages + first // (P // N))
            for tile in range(first, last):
                slot = turn % 2
                mbarrier.wait(free.index(slot), ((turn // 2) % 2) ^ 1)
                inside = (tile % (P // N)) * N
                if tile * N + N <= n_keys:
                    mbarrier.expect(ready.index(slot), N * K * 2)
                    _copy_block(
                        latents, shareds, page * page_rows + inside, k_lo.index(slot), k_hi.index(slot),
                        k_r.index(slot), ready.index(slot), D,
                    )  # fmt: skip
                else:
                    base = cache + page.to(gl.int64) * page_stride + inside * K
                    _copy_columns(k_lo.index(slot), base, n_keys - tile * N, 0, D, K)
                    _copy_columns(k_hi.index(slot), base, n_keys - tile * N, D, D, K)
                    _copy_columns(k_r.index(slot), base, n_keys - tile * N, 2 * D, R, K)
                    async_copy.commit_group()
                    async_copy.wait_group(0)
                    fence_async_shared()
                    _everybody()
                    mbarrier.arrive(ready.index(slot), count=1)
                page = gl.load(pages + (tile + 1) // (P // N), mask=tile + 1 < last, other=0)
                turn += 1
        at = start + last
        row += 1


@gluon.jit
def _products(
    tensors,
    places,
    scalars,
    scale,
    upper: gl.constexpr,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    BLOCK_B: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    FEWEST: gl.constexpr,
):
    """One warp group: all scores, and the lower or upper half of the values."""
    bound, line, o, lse, part_o, part_lse = tensors
    q_lo, q_hi, q_r, k_lo, k_hi, k_r, q_ready, q_free, ready, free = places
    n_rows, n_parts = scalars
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    of_scores: gl.constexpr = gl.SliceLayout(1, score)
    of_output: gl.constexpr = gl.SliceLayout(1, output)
    block = gl.program_id(0)
    part = gl.program_id(1)
    at, end, row = _piece(line, n_rows, n_parts, BLOCK_B, FEWEST, 4)
    m = block * M + gl.arange(0, M, layout=of_scores)
    n = gl.arange(0, N, layout=gl.SliceLayout(0, score))
    m_o = (block * M + gl.arange(0, M, layout=of_output))[:, None]
    c_o = (upper * D + gl.arange(0, D, layout=gl.SliceLayout(0, output)))[None, :]
    turn = 0
    row_turn = 0
    while at < end:
        start = gl.load(line + row)
        steps = gl.load(line + row + 1) - start
        first = at - start
        last = gl.minimum(end - start, steps)
        if last > first:
            bound_M = gl.load(bound + row * G + gl.minimum(m // H, G - 1))
            mbarrier.wait(q_ready, row_turn % 2)
            peak_M = gl.full([M], float("-inf"), gl.float32, of_scores)
            sum_M = gl.zeros([M], gl.float32, of_scores)
            acc = gl.zeros([M, D], gl.float32, output)
            for tile in range(first, last):
                slot = turn % 2
                mbarrier.wait(ready.index(slot), (turn // 2) % 2)
                s = gl.zeros([M, N], gl.float32, score)
                lo, hi = k_lo.index(slot), k_hi.index(slot)
                s = warpgroup_mma(q_lo, lo.permute((1, 0)), s, use_acc=False, is_async=True)
                s = warpgroup_mma(q_hi, hi.permute((1, 0)), s, is_async=True)
                s = warpgroup_mma(q_r, k_r.index(slot).permute((1, 0)), s, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                s = gl.where((tile * N + n)[None, :] < bound_M[:, None], s * scale, float("-inf"))
                peak = gl.maximum(peak_M, gl.max(s, 1))
                shift = gl.where(peak == float("-inf"), 0.0, peak)
                p = gl.exp2(s - shift[:, None])
                fade = gl.exp2(peak_M - shift)
                sum_M = sum_M * fade + gl.sum(p, 1)
                peak_M = peak
                acc = acc * gl.convert_layout(fade, of_output)[:, None]
                p_MN = gl.convert_layout(p.to(lo.dtype), left)
                if upper:
                    product = warpgroup_mma(p_MN, hi, acc, is_async=True)
                else:
                    product = warpgroup_mma(p_MN, lo, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[product])
                _everybody()  # of this group
                mbarrier.arrive(free.index(slot), count=1)
                turn += 1
            _everybody()
            mbarrier.arrive(q_free, count=1)
            row_turn += 1
            share = gl.convert_layout(1.0 / gl.where(sum_M == 0.0, 1.0, sum_M), of_output)
            acc = acc * share[:, None]
            lse_M = (peak_M + gl.log2(sum_M)) * 0.6931471805599453
            if (first == 0) & (last == steps):
                base = row.to(gl.int64) * (G * H)
                to = o + base * (2 * D) + m_o * (2 * D) + c_o
                gl.store(to, acc.to(o.dtype.element_ty), mask=m_o < G * H)
                if not upper:
                    gl.store(lse + base + m, lse_M, mask=m < G * H)
            else:
                piece = (2 * part + gl.where(first == 0, 1, 0)).to(gl.int64) * (G * H)
                at_o = part_o + piece * (2 * D) + m_o * (2 * D) + c_o
                gl.store(at_o, acc, mask=m_o < G * H)
                if not upper:
                    gl.store(part_lse + piece + m, lse_M, mask=m < G * H)
        at = start + last
        row += 1


@gluon.jit
def attend_wide(
    cache,
    latents,
    shareds,
    q_latents,
    q_shareds,
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
    H: gl.constexpr,
    G: gl.constexpr,
    P: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
    BLOCK_B: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    FEWEST: gl.constexpr,
):
    """One piece of the line for one block of queries, as `mla.attend`. scale includes log2(e)."""
    dtype: gl.constexpr = cache.dtype.element_ty
    rows: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    q_lo = gl.allocate_shared_memory(dtype, [M, D], rows)
    q_hi = gl.allocate_shared_memory(dtype, [M, D], rows)
    q_r = gl.allocate_shared_memory(dtype, [M, R], rows)
    k_lo = gl.allocate_shared_memory(dtype, [2, N, D], rows)
    k_hi = gl.allocate_shared_memory(dtype, [2, N, D], rows)
    k_r = gl.allocate_shared_memory(dtype, [2, N, R], rows)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=2)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    _everybody()
    places = (q_lo, q_hi, q_r, k_lo, k_hi, k_r, q_ready, q_free, ready, free)
    results = (bound, line, o, lse, part_o, part_lse)
    inputs = (cache, latents, shareds, q_latents, q_shareds, page_table, line, length)
    lower: gl.constexpr = 0
    upper: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_products, (results, places, (n_rows, n_parts), scale, lower, H, G, D, BLOCK_B, M, N, FEWEST)),
            (_products, (results, places, (n_rows, n_parts), scale, upper, H, G, D, BLOCK_B, M, N, FEWEST)),
            (
                _copies,
                (inputs, places, (n_rows, n_parts, page_stride, table_stride), H, G, P, D, R, BLOCK_B, M, N, FEWEST),
            ),
        ],
        [4, 1],
        [224, 64],
    )  # fmt: skip
