"""The inner loop of latent attention: tiles of keys against one block of queries, softmax carried along.

A query is one (token, head) pair of a row's verify group; all of a row's queries share its keys. Both orientations
compute the same: `queries_first` lays queries along the 64 rows of the matrix unit, `keys_first` lays keys there, so
that few queries (12 heads, one token) are padded to 16 and not to 64. A key is loaded once and used twice, as key
(all of it) and as value (its latent part). Beyond the row's keys zeros are loaded: what lies there may be NaN.

Letters: M queries of a block, N keys of a tile, C latent width, R shared key dims.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_keys(
    cache,
    pages,
    page_stride,
    tile,
    n_keys,
    P: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Latent [N, BLOCK_C] and shared part [N, BLOCK_R] of a tile; zeros beyond `n_keys`."""
    n = tl.arange(0, N)
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    seen = tile * N + n < n_keys
    if P % N == 0:  # one page holds the tile
        page = tl.load(pages + tile // (P // N)).to(tl.int64)
        base = cache + page * page_stride + (tile % (P // N)) * (N * (C + R))
        at = base + n * (C + R)
    else:
        key = tile * N + n
        page = tl.load(pages + key // P, mask=seen, other=0).to(tl.int64)
        at = cache + page * page_stride + (key % P) * (C + R)
    latent, shared = at[:, None] + c[None, :], at[:, None] + C + r[None, :]
    if C < BLOCK_C:
        k_NC = tl.load(latent, mask=seen[:, None] & (c < C)[None, :], other=0.0)
    else:
        k_NC = tl.load(latent, mask=seen[:, None], other=0.0)
    if R < BLOCK_R:
        k_NR = tl.load(shared, mask=seen[:, None] & (r < R)[None, :], other=0.0)
    else:
        k_NR = tl.load(shared, mask=seen[:, None], other=0.0)
    return k_NC, k_NR


@triton.jit
def queries_first(
    q_MC,
    q_MR,
    o_MC,
    peak_M,
    sum_M,
    cache,
    pages,
    page_stride,
    first,
    last,
    n_keys,
    bound_M,
    scale,
    P: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles first .. last - 1 brought into o [M, C], peak and sum [M]. scale includes log2(e)."""
    n = tl.arange(0, N)
    for tile in tl.range(first, last, num_stages=STAGES):
        k_NC, k_NR = load_keys(
            cache, pages, page_stride, tile, n_keys, P, N, C, R, BLOCK_C, BLOCK_R
        )
        s = tl.dot(q_MC, tl.trans(k_NC), input_precision="ieee")
        s = tl.dot(q_MR, tl.trans(k_NR), s, input_precision="ieee") * scale
        s = tl.where((tile * N + n)[None, :] < bound_M[:, None], s, float("-inf"))
        peak = tl.maximum(peak_M, tl.max(s, 1))
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        p = tl.exp2(s - shift[:, None])
        fade = tl.exp2(peak_M - shift)
        sum_M = sum_M * fade + tl.sum(p, 1)
        o_MC = tl.dot(p.to(k_NC.dtype), k_NC, o_MC * fade[:, None], input_precision="ieee")
        peak_M = peak
    return o_MC, peak_M, sum_M


@triton.jit
def keys_first(
    q_MC,
    q_MR,
    o_CM,
    peak_M,
    sum_M,
    cache,
    pages,
    page_stride,
    first,
    last,
    n_keys,
    bound_M,
    scale,
    P: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same with everything transposed: o [C, M]."""
    n = tl.arange(0, N)
    for tile in tl.range(first, last, num_stages=STAGES):
        k_NC, k_NR = load_keys(
            cache, pages, page_stride, tile, n_keys, P, N, C, R, BLOCK_C, BLOCK_R
        )
        s = tl.dot(k_NC, tl.trans(q_MC), input_precision="ieee")
        s = tl.dot(k_NR, tl.trans(q_MR), s, input_precision="ieee") * scale
        s = tl.where((tile * N + n)[:, None] < bound_M[None, :], s, float("-inf"))
        peak = tl.maximum(peak_M, tl.max(s, 0))
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        p = tl.exp2(s - shift[None, :])
        fade = tl.exp2(peak_M - shift)
        sum_M = sum_M * fade + tl.sum(p, 0)
        o_CM = tl.dot(
            tl.trans(k_NC), p.to(k_NC.dtype), o_CM * fade[None, :], input_precision="ieee"
        )
        peak_M = peak
    return o_CM, peak_M, sum_M
