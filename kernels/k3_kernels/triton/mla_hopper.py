"""`mla.attend` for Hopper and few queries, in Gluon: the same contract, layouts and order of copies chosen by hand.

Triton's pipeliner issues the copy of the next tile after the products of this one, waits for it at once, and lets
both warp groups compute all scores. Here the copy engine refills a tile's place with the tile after the next as soon as
its products are done, so that a copy has a whole tile's time and no thread spends any on it; the warp groups share the
scores. Two tiles and the queries fill the shared memory. The engine cannot leave out what lies behind a row's last
key, so a row's last, partly filled tile is copied by the threads, with zeros there.

Pages hold whole tiles, C and R are powers of two, a layer's pages begin a multiple of a row apart; other shapes go to
`mla.attend`.
Letters: M queries of a block, N keys of a tile, C latent width, R shared key dims, W warps.
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


def descriptors(rows: Tensor, keys: int, latent: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """A matrix of latent rows for the copy engine: tiles of the latent and of the shared part."""
    layout = gl.NVMMASharedLayout(128, 16)
    return (
        TensorDescriptor.from_tensor(rows, [keys, latent], layout),
        TensorDescriptor.from_tensor(rows, [keys, rows.shape[1] - latent], layout),
    )


@gluon.constexpr_function
def _swizzle(row_bytes: int) -> int:
    return min(128, row_bytes)


@gluon.jit
def _start_copy(
    latents,
    shareds,
    k_NC,
    k_NR,
    arrived,
    page,
    page_rows,
    tile,
    slot,
    there,
    P: gl.constexpr,
    N: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
):
    """Have the copy engine bring a full tile to a slot; nothing unless `there`."""
    row = page * page_rows + (tile % (P // N)) * N
    bar = arrived.index(slot)
    mbarrier.expect(bar, N * (C + R) * 2, pred=there)
    tma.async_copy_global_to_shared(latents, [row, 0], bar, k_NC.index(slot), pred=there)
    tma.async_copy_global_to_shared(shareds, [row, C], bar, k_NR.index(slot), pred=there)


@gluon.jit
def _copy_by_threads(
    cache,
    k_NC,
    k_NR,
    page,
    page_stride,
    tile,
    n_keys,
    P: gl.constexpr,
    N: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    W: gl.constexpr,
):
    """Start copying a tile as one group, zeros behind the last key."""
    by_C: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [W, 1], [1, 0])
    by_R: gl.constexpr = gl.BlockedLayout([1, 8], [256 // R, R // 8], [W, 1], [1, 0])
    base = cache + page.to(gl.int64) * page_stride + (tile % (P // N)) * (N * (C + R))
    n = gl.arange(0, N, layout=gl.SliceLayout(1, by_C))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, by_C))
    latent = base + n[:, None] * (C + R) + c[None, :]
    async_copy.async_copy_global_to_shared(k_NC, latent, mask=(tile * N + n < n_keys)[:, None])
    n = gl.arange(0, N, layout=gl.SliceLayout(1, by_R))
    r = gl.arange(0, R, layout=gl.SliceLayout(0, by_R))
    shared = base + n[:, None] * (C + R) + (C + r)[None, :]
    async_copy.async_copy_global_to_shared(k_NR, shared, mask=(tile * N + n < n_keys)[:, None])
    async_copy.commit_group()


@gluon.jit
def _page(pages, tile, tail, P: gl.constexpr, N: gl.constexpr):
    return gl.load(pages + tile // (P // N), mask=tile < tail, other=0)


@gluon.jit
def _scores(
    q_MC, q_MR, k_NC, k_NR, shape: gl.constexpr, KEYS_FIRST: gl.constexpr, score: gl.constexpr
):
    """Two products under way, the scores of a tile."""
    s = gl.zeros(shape, gl.float32, score)
    if KEYS_FIRST:
        s = warpgroup_mma(k_NC, q_MC.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(k_NR, q_MR.permute((1, 0)), s, is_async=True)
    else:
        s = warpgroup_mma(q_MC, k_NC.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_MR, k_NR.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _values(
    s,
    acc,
    k_NC,
    p_NM,
    peak_M,
    weight,
    keys,
    bound_M,
    scale,
    KEYS_FIRST: gl.constexpr,
    output: gl.constexpr,
):
    """Softmax of a tile's scores; the product with its values under way, the new peak and weights."""
    A: gl.constexpr = 1 if KEYS_FIRST else 0
    seen = gl.expand_dims(keys, A) < gl.expand_dims(bound_M, 1 - A)
    s = gl.where(seen, s * scale, float("-inf"))
    peak = gl.maximum(peak_M, gl.max(s, 1 - A))
    shift = gl.where(peak == float("-inf"), 0.0, peak)
    p = gl.exp2(s - gl.expand_dims(shift, 1 - A))
    fade = gl.exp2(peak_M - shift)
    weight = weight * gl.expand_dims(fade, 1 - A) + p
    p_NM.store(p.to(p_NM.dtype))
    fence_async_shared()
    fade = gl.convert_layout(fade, gl.SliceLayout(1 - A, output))
    acc = acc * gl.expand_dims(fade, 1 - A)
    if KEYS_FIRST:
        acc = warpgroup_mma(k_NC.permute((1, 0)), p_NM, acc, is_async=True)
    else:
        acc = warpgroup_mma(p_NM, k_NC, acc, is_async=True)
    return acc, peak, weight


@gluon.jit
def _queries(
    q_MC,
    q_MR,
    q,
    count,
    M: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    W: gl.constexpr,
):
    """Queries of a block into shared memory, zeros behind the last."""
    by_C: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [W, 1], [1, 0])
    by_R: gl.constexpr = gl.BlockedLayout([1, 8], [256 // R, R // 8], [W, 1], [1, 0])
    m = gl.arange(0, M, layout=gl.SliceLayout(1, by_C))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, by_C))
    at = q + m[:, None] * (C + R) + c[None, :]
    q_MC.store(gl.load(at, mask=(m < count)[:, None], other=0.0))
    m = gl.arange(0, M, layout=gl.SliceLayout(1, by_R))
    r = gl.arange(0, R, layout=gl.SliceLayout(0, by_R))
    at = q + m[:, None] * (C + R) + (C + r)[None, :]
    q_MR.store(gl.load(at, mask=(m < count)[:, None], other=0.0))
    fence_async_shared()


@gluon.jit
def attend_hopper(
    q,
    cache,
    latents,
    shareds,
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
    C: gl.constexpr,
    R: gl.constexpr,
    BLOCK_B: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    UNIT: gl.constexpr,
    FEWEST: gl.constexpr,
    KEYS_FIRST: gl.constexpr,
    W: gl.constexpr,
):
    """One piece of the line for one block of queries, as `mla.attend`. scale includes log2(e)."""
    # Scores are [M, N], or [N, M] with keys first; the output [M, C] or [C, M]. A: the axis of queries in both.
    groups: gl.constexpr = W // 4
    A: gl.constexpr = 1 if KEYS_FIRST else 0
    if KEYS_FIRST:
        s_width: gl.constexpr = M // groups if 16 * groups <= M else M
        score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, s_width, 16])
        output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, M, 16])
        s_shape: gl.constexpr = [N, M]
        o_shape: gl.constexpr = [C, M]
        p_layout: gl.constexpr = gl.NVMMASharedLayout(_swizzle(M * 2), 16)
    else:
        score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, N // groups, 16])
        o_width: gl.constexpr = C // groups if C // groups < 256 else 256
        output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, o_width, 16])
        s_shape: gl.constexpr = [M, N]
        o_shape: gl.constexpr = [M, C]
        p_layout: gl.constexpr = gl.NVMMASharedLayout(_swizzle(N * 2), 16)
    of_scores: gl.constexpr = gl.SliceLayout(1 - A, score)
    of_output: gl.constexpr = gl.SliceLayout(1 - A, output)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = q.dtype.element_ty

    q_MC = gl.allocate_shared_memory(dtype, [M, C], tile_layout)
    q_MR = gl.allocate_shared_memory(dtype, [M, R], tile_layout)
    k_NC = gl.allocate_shared_memory(dtype, [2, N, C], tile_layout)
    k_NR = gl.allocate_shared_memory(dtype, [2, N, R], tile_layout)
    p_NM = gl.allocate_shared_memory(dtype, s_shape, p_layout)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    turn = 0  # full tiles so far: which slot is next, and which phase of its barrier
    page_rows = (page_stride // (C + R)).to(gl.int32)

    block = gl.program_id(0)
    part = gl.program_id(1)
    # The schedule of all rows at once: a load per row would wait for memory several times in a row.
    rows = gl.arange(0, BLOCK_B, layout=gl.BlockedLayout([1], [32], [W], [0]))
    starts = gl.load(line + rows, mask=rows < n_rows, other=0)
    ends = gl.load(line + 1 + rows, mask=rows < n_rows, other=2147483647)
    lengths = gl.load(length + rows, mask=rows < n_rows, other=0)
    total = gl.max(gl.where(rows < n_rows, ends, 0), 0)
    used = gl.minimum(n_parts, gl.maximum(total // FEWEST, 1))  # as mla.parts_of
    at = part * total // used
    end = (part + 1) * total // used
    if part >= used:
        at = end
    row = gl.sum((ends <= at).to(gl.int32), 0)

    m = block * M + gl.arange(0, M, layout=of_scores)
    n = gl.arange(0, N, layout=gl.SliceLayout(A, score))
    m_o = block * M + gl.arange(0, M, layout=of_output)
    c_o = gl.arange(0, C, layout=gl.SliceLayout(A, output))
    real = gl.expand_dims(m_o < G * H, 1 - A)
    while at < end:
        here = rows == row
        start = gl.sum(gl.where(here, starts, 0), 0)
        steps = gl.sum(gl.where(here, ends - starts, 0), 0)
        n_keys = gl.sum(gl.where(here, lengths, 0), 0)
        first = at - start
        last = gl.minimum(end - start, steps)
        if last > first:
            pages = page_table + row * table_stride
            head = first * (UNIT // N)
            tail = gl.minimum(last * (UNIT // N), (n_keys + N - 1) // N)
            full = gl.minimum(tail, n_keys // N)
            for i in gl.static_range(2):
                _start_copy(
                    latents, shareds, k_NC, k_NR, arrived, _page(pages, head + i, full, P, N), page_rows,
                    head + i, (turn + i) % 2, head + i < full, P, N, C, R,
                )  # fmt: skip
            base = row.to(gl.int64) * (G * H)
            bound_M = gl.load(bound + row * G + gl.minimum(m // H, G - 1))
            _queries(q_MC, q_MR, q + (base + block * M) * (C + R), G * H - block * M, M, C, R, W)
            peak_M = gl.full([M], float("-inf"), gl.float32, of_scores)
            weight = gl.zeros(
                s_shape, gl.float32, score
            )  # of every score; summed over keys at the end
            acc = gl.zeros(o_shape, gl.float32, output)
            for rest in range(2):  # full tiles, then the partly filled one: the same code
                lo = head
                hi = full
                if rest == 1:
                    lo = full
                    hi = tail
                    if tail > full:
                        slot = turn % 2
                        page = _page(pages, full, tail, P, N)
                        _copy_by_threads(
                            cache,
                            k_NC.index(slot),
                            k_NR.index(slot),
                            page,
                            page_stride,
                            full,
                            n_keys,
                            P,
                            N,
                            C,
                            R,
                            W,
                        )
                        async_copy.wait_group(0)
                        fence_async_shared()
                        _everybody()
                        mbarrier.arrive(arrived.index(slot), count=1)
                for tile in range(lo, hi):
                    slot = turn % 2
                    page = _page(
                        pages, tile + 2, full, P, N
                    )  # needed at the end: its latency is hidden
                    mbarrier.wait(arrived.index(slot), (turn // 2) % 2)
                    s = _scores(
                        q_MC, q_MR, k_NC.index(slot), k_NR.index(slot), s_shape, KEYS_FIRST, score
                    )
                    s = warpgroup_mma_wait(0, deps=[s])
                    product, peak_M, weight = _values(
                        s,
                        acc,
                        k_NC.index(slot),
                        p_NM,
                        peak_M,
                        weight,
                        tile * N + n,
                        bound_M,
                        scale,
                        KEYS_FIRST,
                        output,
                    )
                    acc = warpgroup_mma_wait(0, deps=[product])
                    _everybody()  # both warp groups are done with the slot
                    _start_copy(
                        latents,
                        shareds,
                        k_NC,
                        k_NR,
                        arrived,
                        page,
                        page_rows,
                        tile + 2,
                        slot,
                        tile + 2 < full,
                        P,
                        N,
                        C,
                        R,
                    )
                    turn += 1
            _everybody()
            sum_M = gl.sum(weight, 1 - A)
            share = gl.convert_layout(1.0 / gl.where(sum_M == 0.0, 1.0, sum_M), of_output)
            acc = acc * gl.expand_dims(share, 1 - A)
            lse_M = (peak_M + gl.log2(sum_M)) * 0.6931471805599453
            if (first == 0) & (last == steps):
                to_o = o + base * C + gl.expand_dims(m_o, 1 - A) * C + gl.expand_dims(c_o, A)
                gl.store(to_o, acc.to(o.dtype.element_ty), mask=real)
                gl.store(lse + base + m, lse_M, mask=m < G * H)
            else:
                piece = (2 * part + gl.where(first == 0, 1, 0)).to(gl.int64) * (G * H)
                at_o = part_o + piece * C + gl.expand_dims(m_o, 1 - A) * C + gl.expand_dims(c_o, A)
                gl.store(at_o, acc, mask=real)
                gl.store(part_lse + piece + m, lse_M, mask=m < G * H)
        at = start + last
        row += 1
