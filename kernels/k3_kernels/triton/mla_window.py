"""What a library's attention misses of per-token bounds, and its correction.

Libraries know one length per row, with the usual causal rule (with length L, token i of G sees L - (G - 1 - i) keys) or
without (all see L). `reach` picks the largest L for which nobody sees a key beyond its bound; bounds of a group grow by
at most one a token, so what a token misses is a window of fewer than G keys up to its bound. With the causal rule the
windows are empty where one rank holds all keys. `correct` brings the windows in, drops the library's answer where it saw nothing (bound 0, or fewer
keys than later tokens), and writes the lse as [T, H].

Letters: T tokens, B rows, G group tokens, H heads, C latent width, R shared key dims, M heads of a block, N window keys.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reach(
    bound,
    length,
    n_rows,
    G: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """`length` [B] for the library, at least 1 (it reads a page of every row); tokens with bound 0 have no say."""
    row = tl.arange(0, BLOCK_B)
    token = tl.arange(0, BLOCK_G)
    here = (row < n_rows)[:, None] & (token < G)[None, :]
    bounds = tl.load(bound + row[:, None] * G + token[None, :], mask=here, other=0)
    later = (G - 1 - token)[None, :] if CAUSAL else 0
    allowed = tl.where(bounds > 0, bounds + later, 2147483647)
    most = tl.minimum(tl.min(allowed, 1), tl.max(bounds, 1))
    tl.store(length + row, tl.maximum(most, 1), mask=row < n_rows)


@triton.jit
def correct(
    q,
    cache,
    page_table,
    bound,
    length,
    o,
    lse,
    to_lse,
    scale,
    page_stride,
    table_stride,
    lse_row,
    lse_token,
    lse_head,
    H: tl.constexpr,
    G: tl.constexpr,
    CAUSAL: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """One block of heads of one token; o [T, H, C] in place. lse natural on both sides."""
    t = tl.program_id(0)
    row = t // G
    h = tl.program_id(1) * M + tl.arange(0, M)
    n_keys = tl.load(bound + t)
    later = G - 1 - t % G if CAUSAL else 0
    start = tl.minimum(tl.maximum(tl.load(length + row) - later, 0), n_keys)
    lse_at = lse + row.to(tl.int64) * lse_row + (t % G) * lse_token + h * lse_head
    known = (h < H) & (start > 0)
    lse_M = tl.load(lse_at, mask=known, other=float("-inf"))
    if (start == n_keys) & (n_keys > 0):
        tl.store(to_lse + t * H + h, lse_M, mask=h < H)
    else:
        c = tl.arange(0, BLOCK_C)
        r = tl.arange(0, BLOCK_R)
        key = start + tl.arange(0, N)
        seen = key < n_keys
        page = tl.load(page_table + row * table_stride + key // P, mask=seen, other=0).to(tl.int64)
        at = cache + page * page_stride + (key % P) * (C + R)
        k_NC = tl.load(at[:, None] + c[None, :], mask=seen[:, None] & (c < C)[None, :], other=0.0)
        k_NR = tl.load(
            at[:, None] + C + r[None, :], mask=seen[:, None] & (r < R)[None, :], other=0.0
        )
        q_at = q + (t.to(tl.int64) * H + h) * (C + R)
        here_C = (h < H)[:, None] & (c < C)[None, :]
        q_MC = tl.load(q_at[:, None] + c[None, :], mask=here_C, other=0.0)
        q_MR = tl.load(
            q_at[:, None] + C + r[None, :], mask=(h < H)[:, None] & (r < R)[None, :], other=0.0
        )
        s = tl.dot(q_MC, tl.trans(k_NC), input_precision="ieee")
        s = tl.dot(q_MR, tl.trans(k_NR), s, input_precision="ieee") * scale
        s = tl.where(seen[None, :], s, float("-inf"))
        peak = tl.maximum(lse_M, tl.max(s, 1))
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        p = tl.exp(s - shift[:, None])
        weight = tl.exp(lse_M - shift)
        total = weight + tl.sum(p, 1)
        o_at = o + (t.to(tl.int64) * H + h)[:, None] * C + c[None, :]
        before = tl.load(o_at, mask=here_C & (start > 0), other=0.0).to(tl.float32)
        mine = tl.dot(p.to(k_NC.dtype), k_NC, input_precision="ieee")
        merged = before * weight[:, None] + mine
        merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(o_at, merged.to(o.dtype.element_ty), mask=here_C)
        tl.store(to_lse + t * H + h, shift + tl.log(total), mask=h < H)
