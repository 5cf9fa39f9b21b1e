"""`mla.attend` for Hopper and blocks of 64 queries: two warp groups that take turns at the scores, and one warp that copies.

Tiles go in pairs. Group 0 scores the first tile of a pair and keeps the lower half of the output, group 1 the second
tile and the upper half; each multiplies both tiles' weights P with its half of the values. P reaches the other group in
the place of the tile's shared part, which nobody needs once the scores are there. The running maximum passes from tile
to tile in their order: group 1 waits for the first tile's, brings the first P to the new one, and hands both back. So
one group's softmax runs beside the other's products, and no product is computed twice.

The third partition keeps both tiles of a pair coming through the copy engine, half a tile as soon as its place is free; a
row's last, partly filled tile it copies itself, with zeros behind the keys. A piece of an odd number of tiles ends with
a tile that comes twice, the second time hidden.

Barriers, per tile of a pair and half of it: `ready` (arrived), `free` (all readers are done); per tile `passed` (its P and
maximum can be read); per group `summed`. C is 512, R is 64; otherwise as `mla_hopper`.
Letters: M queries of a block, N keys of a tile, D half of the latent width, R shared key dims.
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
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from k3_kernels.triton.mla_pair import everybody, first_of_pair, second_of_pair

TILE, HALF, SHARED = 64, 256, 64
REGISTERS = (232, 40)  # of a thread that multiplies, of one that copies


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
def _copy_columns(to, base, n_valid, first: gl.constexpr, count: gl.constexpr, K: gl.constexpr):
    lanes: gl.constexpr = 32 if count >= 256 else count // 8
    by: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [1, 1], [1, 0])
    n = gl.arange(0, to.shape[0], layout=gl.SliceLayout(1, by))
    c = gl.arange(0, count, layout=gl.SliceLayout(0, by))
    at = base + n[:, None] * K + (first + c)[None, :]
    async_copy.async_copy_global_to_shared(to, at, mask=(n < n_valid)[:, None])


@gluon.jit
def _by_threads(
    cache,
    page,
    page_stride,
    inside,
    n_valid,
    keys,
    barriers,
    slot: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
):
    """A row's last, partly filled tile into a free place, zeros behind its keys."""
    k_lo, k_hi, k_r = keys
    ready_lo, ready_hi, _, _ = barriers
    K: gl.constexpr = 2 * D + R
    base = cache + page.to(gl.int64) * page_stride + inside * K
    _copy_columns(k_lo.index(slot), base, n_valid, 0, D, K)
    _copy_columns(k_hi.index(slot), base, n_valid, D, D, K)
    _copy_columns(k_r.index(slot), base, n_valid, 2 * D, R, K)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    everybody()
    mbarrier.arrive(ready_lo.index(slot), count=1)
    mbarrier.arrive(ready_hi.index(slot), count=1)


@gluon.jit
def _bring(
    tensors,
    page,
    page_stride,
    tile,
    n_keys,
    keys,
    barriers,
    phase,
    slot: gl.constexpr,
    P: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
):
    """A tile, each half as soon as its place is free. The shared part comes with the half that is needed last."""
    cache, latents, shareds = tensors
    k_lo, k_hi, k_r = keys
    ready_lo, ready_hi, free_lo, free_hi = barriers
    inside = (tile % (P // N)) * N
    row = page * (page_stride // (2 * D + R)).to(gl.int32) + inside
    full = tile * N + N <= n_keys
    lo, hi = ready_lo.index(slot), ready_hi.index(slot)
    if slot == 0:
        mbarrier.wait(free_lo.index(slot), phase)
        mbarrier.expect(lo, N * D * 2, pred=full)
        tma.async_copy_global_to_shared(latents, [row, 0], lo, k_lo.index(slot), pred=full)
        mbarrier.wait(free_hi.index(slot), phase)
        mbarrier.expect(hi, N * (D + R) * 2, pred=full)
        tma.async_copy_global_to_shared(latents, [row, D], hi, k_hi.index(slot), pred=full)
        tma.async_copy_global_to_shared(shareds, [row, 2 * D], hi, k_r.index(slot), pred=full)
    else:
        mbarrier.wait(free_hi.index(slot), phase)
        mbarrier.expect(hi, N * D * 2, pred=full)
        tma.async_copy_global_to_shared(latents, [row, D], hi, k_hi.index(slot), pred=full)
        mbarrier.wait(free_lo.index(slot), phase)
        mbarrier.expect(lo, N * (D + R) * 2, pred=full)
        tma.async_copy_global_to_shared(latents, [row, 0], lo, k_lo.index(slot), pred=full)
        tma.async_copy_global_to_shared(shareds, [row, 2 * D], lo, k_r.index(slot), pred=full)
    if tile * N + N > n_keys:
        n_valid = n_keys - tile * N
        _by_threads(cache, page, page_stride, inside, n_valid, keys, barriers, slot, D, R)


@gluon.jit
def _copies(
    tensors,
    tables,
    queries,
    keys,
    barriers,
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
    """The copying warp: a row's queries, then its tiles, two by two."""
    q_latents, q_shareds, page_table, line, length = tables
    q_lo, q_hi, q_r, q_ready, q_free = queries
    n_rows, n_parts, page_stride, table_stride = scalars
    at, end, row = _piece(line, n_rows, n_parts, BLOCK_B, FEWEST, 1)
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
            mbarrier.expect(q_ready, M * (2 * D + R) * 2)
            q_row = row * (G * H) + gl.program_id(0) * M
            tma.async_copy_global_to_shared(q_latents, [q_row, 0], q_ready, q_lo)
            tma.async_copy_global_to_shared(q_latents, [q_row, D], q_ready, q_hi)
            tma.async_copy_global_to_shared(q_shareds, [q_row, 2 * D], q_ready, q_r)
            row_turn += 1
            pages = page_table + row * table_stride
            page = gl.load(pages + first // (P // N))
            second = gl.minimum(first + 1, last - 1)
            second_page = gl.load(pages + second // (P // N))
            for tile in range(first, last, 2):
                phase = (turn % 2) ^ 1
                _bring(
                    tensors, page, page_stride, tile, n_keys, keys, barriers, phase, 0, P, N, D, R
                )
                _bring(
                    tensors,
                    second_page,
                    page_stride,
                    second,
                    n_keys,
                    keys,
                    barriers,
                    phase,
                    1,
                    P,
                    N,
                    D,
                    R,
                )
                page = gl.load(pages + gl.minimum(tile + 2, last - 1) // (P // N))
                second = gl.minimum(tile + 3, last - 1)
                second_page = gl.load(pages + second // (P // N))
                turn += 1
        at = start + last
        row += 1


@gluon.jit
def _products(
    tensors,
    queries,
    keys,
    barriers,
    passing,
    adding,
    scalars,
    scale,
    group: gl.constexpr,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    BLOCK_B: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    FEWEST: gl.constexpr,
):
    """One warp group: every second tile's scores, and its half of the values."""
    bound, line, o, lse, part_o, part_lse = tensors
    q_ready, q_free = queries[3], queries[4]
    sums, summed = adding
    n_rows, n_parts = scalars
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    of_scores: gl.constexpr = gl.SliceLayout(1, score)
    of_output: gl.constexpr = gl.SliceLayout(1, output)
    block = gl.program_id(0)
    part = gl.program_id(1)
    at, end, row = _piece(line, n_rows, n_parts, BLOCK_B, FEWEST, 4)
    m = block * M + gl.arange(0, M, layout=of_scores)
    n = group * N + gl.arange(0, N, layout=gl.SliceLayout(0, score))
    m_o = (block * M + gl.arange(0, M, layout=of_output))[:, None]
    c_o = (group * D + gl.arange(0, D, layout=gl.SliceLayout(0, output)))[None, :]
    turn = 0
    row_turn = 0
    while at < end:
        start = gl.load(line + row)
        steps = gl.load(line + row + 1) - start
        first = at - start
        last = gl.minimum(end - start, steps)
        if last > first:
            bound_M = gl.load(bound + row * G + gl.minimum(m // H, G - 1))
            bound_M = gl.minimum(
                bound_M, last * N
            )  # hides the second of a pair where it repeats the first
            mbarrier.wait(q_ready, row_turn % 2)
            peak_M = gl.full([M], float("-inf"), gl.float32, of_scores)
            sum_M = gl.zeros([M], gl.float32, of_scores)
            acc = gl.zeros([M, D], gl.float32, output)
            for tile in range(first, last, 2):
                if group == 0:
                    peak_M, sum_M, acc = first_of_pair(
                        queries, keys, barriers, passing, turn % 2, tile * N + n, bound_M, scale, peak_M, sum_M, acc,
                        score, output, M, N,
                    )  # fmt: skip
                else:
                    peak_M, sum_M, acc = second_of_pair(
                        queries, keys, barriers, passing, turn % 2, tile * N + n, bound_M, scale, peak_M, sum_M, acc,
                        score, output, M, N,
                    )  # fmt: skip
                turn += 1
            everybody()
            mbarrier.arrive(q_free, count=1)
            places = 2 * (
                row_turn % 2
            )  # of every second row: the other group may still read those of the row before
            sums.index(places + group).store(sum_M)
            everybody()
            mbarrier.arrive(summed.index(group), count=1)
            mbarrier.wait(summed.index(1 - group), row_turn % 2)
            sum_M += sums.index(places + 1 - group).load(of_scores)
            row_turn += 1
            share = gl.convert_layout(1.0 / gl.where(sum_M == 0.0, 1.0, sum_M), of_output)
            acc = acc * share[:, None]
            lse_M = (peak_M + gl.log2(sum_M)) * 0.6931471805599453
            if (first == 0) & (last == steps):
                base = row.to(gl.int64) * (G * H)
                to = o + base * (2 * D) + m_o * (2 * D) + c_o
                gl.store(to, acc.to(o.dtype.element_ty), mask=m_o < G * H)
                if group == 0:
                    gl.store(lse + base + m, lse_M, mask=m < G * H)
            else:
                piece = (2 * part + gl.where(first == 0, 1, 0)).to(gl.int64) * (G * H)
                at_o = part_o + piece * (2 * D) + m_o * (2 * D) + c_o
                gl.store(at_o, acc, mask=m_o < G * H)
                if group == 0:
                    gl.store(part_lse + piece + m, lse_M, mask=m < G * H)
        at = start + last
        row += 1


@gluon.jit
def _barriers(count: gl.constexpr, arrivals: gl.constexpr, more: gl.constexpr):
    """`count` barriers; the first completes after `arrivals`, each other after `more` more than the one before."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=arrivals + i * more)
    return barriers


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
    FOR_PRODUCTS: gl.constexpr,
    FOR_COPIES: gl.constexpr,
):
    """One piece of the line for one block of queries, as `mla.attend`. scale includes log2(e)."""
    dtype: gl.constexpr = cache.dtype.element_ty
    rows: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    q_lo = gl.allocate_shared_memory(dtype, [M, D], rows)
    q_hi = gl.allocate_shared_memory(dtype, [M, D], rows)
    q_r = gl.allocate_shared_memory(dtype, [M, R], rows)
    k_lo = gl.allocate_shared_memory(dtype, [2, N, D], rows)
    k_hi = gl.allocate_shared_memory(dtype, [2, N, D], rows)
    k_r = gl.allocate_shared_memory(dtype, [2, N, R], rows)
    peaks = gl.allocate_shared_memory(gl.float32, [2, M], flat)
    sums = gl.allocate_shared_memory(gl.float32, [4, M], flat)
    # Who reads: the lower half of the first tile group 0 alone, the upper half of the second group 1 alone.
    of_keys = (_barriers(2, 1, 0), _barriers(2, 1, 0), _barriers(2, 1, 1), _barriers(2, 2, -1))
    q_bars = _barriers(2, 1, 1)
    passing = (peaks, _barriers(2, 1, 0))
    adding = (sums, _barriers(2, 1, 0))
    fence_async_shared()
    everybody()
    queries = (q_lo, q_hi, q_r, q_bars.index(0), q_bars.index(1))
    keys = (k_lo, k_hi, k_r)
    results = (bound, line, o, lse, part_o, part_lse)
    inputs = (cache, latents, shareds)
    tables = (q_latents, q_shareds, page_table, line, length)
    lower: gl.constexpr = 0
    upper: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_products, (results, queries, keys, of_keys, passing, adding, (n_rows, n_parts), scale, lower, H, G, D, BLOCK_B, M, N, FEWEST)),
            (_products, (results, queries, keys, of_keys, passing, adding, (n_rows, n_parts), scale, upper, H, G, D, BLOCK_B, M, N, FEWEST)),
            (
                _copies,
                (inputs, tables, queries, keys, of_keys, (n_rows, n_parts, page_stride, table_stride), H, G, P, D, R, BLOCK_B, M, N, FEWEST),
            ),
        ],
        [4, 1],
        [FOR_PRODUCTS, FOR_COPIES],
    )  # fmt: skip
