"""Attention of prefill chunks over cached latents, keys and values expanded: causal, softmax on the way.

A request's latents are gathered from its pages and multiplied with the key and value weights of some heads at a time
(one matrix product); a program then goes over the keys for a block of tokens of one head. The dims that all heads share
are read where they lie, not copied into every head's keys.

Letters: T tokens, H heads, S keys of a request, N + R query dims (R shared), C latent width, V value dims.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

EXPANDED = 1 << 27  # elements of keys and values at a time: 256 MB
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _step(
    q,
    q_shared,
    m,
    total,
    o,
    kv_row,
    shared_row,
    key,
    position,
    n_keys,
    kv_key,
    shared_key,
    scale,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LAST: tl.constexpr,
):
    """One block of keys; LAST: some may lie beyond the end or in a token's future."""
    n, r, v = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_V)
    here = (key < n_keys)[:, None] if LAST else (key >= 0)[:, None]
    rows = kv_row + key.to(tl.int64)[:, None] * kv_key
    k = tl.load(rows + n, mask=here & (n < N), other=0.0)
    shared = tl.load(
        shared_row + key.to(tl.int64)[:, None] * shared_key + r, mask=here & (r < R), other=0.0
    )
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    score = tl.dot(q_shared, tl.trans(shared), score, input_precision="ieee") * scale
    if LAST:
        score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
    best = tl.maximum(m, tl.max(score, 1))  # the first block holds a visible key
    p = tl.exp2(score - best[:, None])
    shrink = tl.exp2(m - best)
    total = total * shrink + tl.sum(p, 1)
    value = tl.load(rows + N + v[None, :], mask=here & (v < V)[None, :], other=0.0)
    o = tl.dot(p.to(value.dtype), value, o * shrink[:, None], input_precision="ieee")
    return best, total, o


@triton.jit
def _attend(
    q_ptr,
    kv_ptr,
    shared_ptr,
    o_ptr,
    q_token,
    q_head,
    kv_head,
    kv_key,
    shared_key,
    o_token,
    o_head,
    n_tokens,
    past,
    scale,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS  # the longest ones begin first
    head = tl.program_id(1).to(tl.int64)
    token = first + tl.arange(0, TOKENS)
    live = (token < n_tokens)[:, None]
    position = past + token
    n, r, v = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_V)
    q_row = q_ptr + token.to(tl.int64)[:, None] * q_token + head * q_head
    q = tl.load(q_row + n, mask=live & (n < N), other=0.0)
    q_shared = tl.load(q_row + N + r, mask=live & (r < R), other=0.0)
    m = tl.full([TOKENS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([TOKENS], dtype=tl.float32)
    o = tl.zeros([TOKENS, BLOCK_V], dtype=tl.float32)
    kv_row = kv_ptr + head * kv_head
    n_keys = past + n_tokens
    common = (past + first + 1) // KEYS * KEYS  # every token of the block sees the keys before
    for start in tl.range(0, common, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        m, total, o = _step(
            q, q_shared, m, total, o, kv_row, shared_ptr, key, position, n_keys, kv_key, shared_key, scale,
            N, R, V, BLOCK_N, BLOCK_R, BLOCK_V, False,
        )  # fmt: skip
    for start in tl.range(common, tl.minimum(past + first + TOKENS, n_keys), KEYS, num_stages=1):
        key = start + tl.arange(0, KEYS)
        m, total, o = _step(
            q, q_shared, m, total, o, kv_row, shared_ptr, key, position, n_keys, kv_key, shared_key, scale,
            N, R, V, BLOCK_N, BLOCK_R, BLOCK_V, True,
        )  # fmt: skip
    o_row = o_ptr + token.to(tl.int64)[:, None] * o_token + head * o_head
    o = (o / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_row + v[None, :], o, mask=live & (v < V)[None, :])


def attend(
    q_THD: Tensor, kv_SHX: Tensor, shared_SR: Tensor, past: int, scale: float, out_THV: Tensor
) -> None:
    """Token i of the chunk sees keys 0 .. past + i. kv: N key dims, then V values of each head; all may be views."""
    n_tokens, heads, width = q_THD.shape
    shared, value = shared_SR.shape[1], out_THV.shape[2]
    nope = width - shared
    for x in (q_THD, kv_SHX, shared_SR, out_THV):
        assert x.stride(-1) == 1, f"rows of attention: strides {x.stride()}"
    assert kv_SHX.shape[2] == nope + value, f"{kv_SHX.shape[2]} dims: expected {nope} + {value}"
    wide = q_THD.dtype == torch.float32
    tokens, keys, stages, warps = (32, 32, 1, 4) if wide else (128, 64, 3, 8)
    tokens = min(tokens, max(16, triton.next_power_of_2(n_tokens)))
    _attend[(triton.cdiv(n_tokens, tokens), heads)](
        q_THD,
        kv_SHX,
        shared_SR,
        out_THV,
        q_THD.stride(0),
        q_THD.stride(1),
        kv_SHX.stride(1),
        kv_SHX.stride(0),
        shared_SR.stride(0),
        out_THV.stride(0),
        out_THV.stride(1),
        n_tokens,
        past,
        scale * math.log2(math.e),
        N=nope,
        R=shared,
        V=value,
        BLOCK_N=max(16, triton.next_power_of_2(nope)),
        BLOCK_R=max(16, triton.next_power_of_2(shared)),
        BLOCK_V=max(16, triton.next_power_of_2(value)),
        TOKENS=tokens,
        KEYS=keys,
        STAGES=stages,
        num_warps=warps if tokens == 128 or wide else 4,
    )


def prefill(
    q_THD: Tensor,
    cache_PTK: Tensor,
    page_table_RW: Tensor,
    cu_lens: tuple[int, ...],
    starts: tuple[int, ...],
    kv_up_HDC: Tensor,
    scale: float,
) -> Tensor:
    """`reference.mla.prefill`."""
    if q_THD.dtype not in DTYPES:
        raise TypeError(
            f"queries {q_THD.dtype}: the triton attention takes one of {', '.join(map(str, DTYPES))}; set "
            "backends.attention=reference for others"
        )
    heads, expanded, rank = kv_up_HDC.shape
    shared, page_tokens = cache_PTK.shape[2] - rank, cache_PTK.shape[1]
    value = expanded - (q_THD.shape[2] - shared)
    out = torch.empty(len(q_THD), heads, value, dtype=q_THD.dtype, device=q_THD.device)
    for r, past in enumerate(starts):
        lo, hi = cu_lens[r], cu_lens[r + 1]
        n_keys = past + hi - lo
        pages = page_table_RW[r, : -(-n_keys // page_tokens)].to(torch.int64)
        latent = cache_PTK.index_select(0, pages).flatten(0, 1)[:n_keys].to(q_THD.dtype)
        at_once = max(1, min(heads, EXPANDED // (n_keys * expanded)))
        for head in range(0, heads, at_once):
            some = slice(head, head + at_once)
            kv = linear(latent[:, :rank], kv_up_HDC[some].flatten(0, 1))
            kv = kv.unflatten(1, (-1, expanded))
            attend(q_THD[lo:hi, some], kv, latent[:, rank:], past, scale, out[lo:hi, some])
    return out
