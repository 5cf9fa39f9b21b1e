"""The delta rule over a prefill chunk: what is per block of 16 tokens in parallel, then one pass over the blocks.

With G_i the running log decay within a block and S the state before it (letters as in `kda_verify`):

    M[i,j] = beta_i k_i.(exp(G_i - G_j) k_j), j < i        U = (I + M)^-1 diag(beta) (V - S (exp(G) K))
    A[i,j] = q_i.(exp(G_i - G_j) k_j), j <= i              O = S (exp(G) Q) + A U
    S <- S diag(exp(G_last)) + U (exp(G_last - G) K)

`_prepare` computes all that does not need the state, one program for a head's block: grown keys and queries, keys
decayed to the end of the block, and the matrix that turns V - S (exp(G) K) into U and A U. Where the gate is bounded
exp(G_i - G_j) is taken apart at the middle of the block, so that M and A are matrix products; where it is not, only
exponents <= 0 are taken, one by one. `_scan` keeps some value rows of a head's state in registers and goes through the blocks.
As in `kda_verify` key and query of a token are neighbours, rows 2i and 2i + 1 of one tile.
Products are three of tf32, as in `kda_verify`: float32 up to the last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.triton.tf32 import product

BLOCK = 16  # tokens
MILDEST = (
    -7.5
)  # of a log decay: over half a block its exponentials and their products stay normal float32


@dataclass(frozen=True, slots=True)
class Tuning:
    """`_scan`: value rows of a program, blocks under way, warps. `_prepare`: channels at once and warps, gate bounded."""

    rows: int
    stages: int
    warps: int
    channels: int
    prepare_warps: int


TUNED = Tuning(16, 3, 4, 32, 1)  # the best of fourteen on an H200
PLAIN = (16, 4)  # channels at once and warps of `_prepare`, any gate: 16 x 16 x 16 exponentials


@triton.jit
def _prepare(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    scratch_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    n_tokens,
    heads,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    FACTORED: tl.constexpr,
    FLOATS: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    token = (block * BLOCK + place).to(tl.int64)
    live = token < n_tokens
    grown = scratch_ptr + (block.to(tl.int64) * heads + head) * FLOATS  # `_floats`
    decayed, matrix = grown + 2 * BLOCK * D, grown + 3 * BLOCK * D
    decay = matrix + 4 * BLOCK * BLOCK
    pairs_k = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    pairs_q = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in tl.range(0, D, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)[None, :]
        mask = live[:, None] & (channel < D)
        at = (token * q_token + head * q_head)[:, None] + channel
        q = tl.load(q_ptr + at, mask=mask, other=0.0)
        at = (token * k_token + head * k_head)[:, None] + channel
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        g = tl.load(g_ptr + ((token * heads + head) * D)[:, None] + channel, mask=mask, other=0.0)
        total = tl.cumsum(g, 0)
        last = tl.sum(g, 0)[None, :]
        if FACTORED:
            middle = tl.sum(tl.where((place < BLOCK // 2)[:, None], g, 0.0), 0)[None, :]
            rise, fall = tl.exp(total - middle), tl.exp(middle - total)
            fallen = tl.trans(k * fall)
            pairs_k += product(k * rise, fallen)
            pairs_q += product(q * rise, fallen)
            growth, rest = rise * tl.exp(middle), fall * tl.exp(last - middle)
        else:
            since = tl.exp(tl.minimum(total[:, None, :] - total[None, :, :], 0.0))
            key = k[None, :, :] * since
            pairs_k += tl.sum(k[:, None, :] * key, 2)
            pairs_q += tl.sum(q[:, None, :] * key, 2)
            growth, rest = tl.exp(total), tl.exp(last - total)
        at = place[:, None] * D + channel
        tl.store(grown + place[:, None] * D + at, k * growth)
        tl.store(grown + (place + 1)[:, None] * D + at, q * growth)
        tl.store(decayed + at, k * rest)
        tl.store(decay + channel, tl.exp(last))
    beta = tl.load(beta_ptr + token * heads + head, mask=live, other=0.0)
    i, j = place[:, None], place[None, :]
    m = tl.where(j < i, pairs_k * beta[:, None], 0.0)
    # (I + M)^-1 = (I - M)(I + M^2)(I + M^4)(I + M^8): M^16 is zero.
    solution = tl.where(i == j, 1.0, 0.0) - m
    for _ in tl.static_range(3):
        m = product(m, m)
        solution += product(solution, m)
    solution = solution * beta[None, :]
    answer = product(tl.where(j <= i, pairs_q, 0.0), solution)
    at = matrix + 4 * i * BLOCK + 2 * j
    tl.store(at, solution)
    tl.store(at + 1, tl.zeros_like(solution))
    tl.store(at + 2 * BLOCK, answer)
    tl.store(at + 2 * BLOCK + 1, tl.zeros_like(solution))


@triton.jit
def _scan(
    v_ptr,
    scratch_ptr,
    state_ptr,
    o_ptr,
    final_ptr,
    v_token,
    v_head,
    state_head,
    n_tokens,
    heads,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FLOATS: tl.constexpr,
    STAGES: tl.constexpr,
):
    head, value = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel, pair = tl.arange(0, D), tl.arange(0, 2 * BLOCK)
    is_key = (pair % 2 == 0)[None, :]
    tile = value[:, None] * D + channel[None, :]
    state = tl.load(state_ptr + head * state_head + tile)
    for block in tl.range(0, tl.cdiv(n_tokens, BLOCK), num_stages=STAGES):
        token = (block * BLOCK + pair // 2).to(tl.int64)
        live = (token < n_tokens)[None, :]
        grown = scratch_ptr + (tl.cast(block, tl.int64) * heads + head) * FLOATS
        decayed, matrix = grown + 2 * BLOCK * D, grown + 3 * BLOCK * D
        seen = product(state, tl.load(grown + pair[None, :] * D + channel[:, None]))
        at = v_ptr + (token * v_token + head * v_head)[None, :] + value[:, None]
        aimed = tl.load(at, mask=live & is_key, other=0.0)
        both = product(aimed - seen, tl.load(matrix + pair[None, :] * (2 * BLOCK) + pair[:, None]))
        at = o_ptr + ((token * heads + head) * D)[None, :] + value[:, None]
        tl.store(at, seen + both, mask=live & (pair % 2 == 1)[None, :])
        key = tl.load(
            decayed + (pair // 2)[:, None] * D + channel[None, :],
            mask=(pair % 2 == 0)[:, None],
            other=0.0,
        )
        decay = tl.load(matrix + 4 * BLOCK * BLOCK + channel)
        state = state * decay[None, :] + product(both, key)
    tl.store(final_ptr + head.to(tl.int64) * (D * D) + tile, state)


def _floats(dim: int) -> int:
    """Scratch of a head's block: keys and queries, decayed keys, the matrix of pairs, the decay."""
    return 3 * BLOCK * dim + 4 * BLOCK * BLOCK + dim


def delta(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    g_THD: Tensor,
    beta_TH: Tensor,
    state_HVK: Tensor,
    *,
    lower_bound: float | None = None,
    tuning: Tuning = TUNED,
) -> tuple[Tensor, Tensor]:
    """`reference.kda.chunk` in float32: o [T, H, D] and the final state, a new tensor. D is a power of two from 16.

    lower_bound: of g, if it has one.
    """
    n_tokens, heads, dim = q_THD.shape
    # the convolution leaves tokens next to each other, not channels
    q_THD, k_THD, v_THD = (x.contiguous() for x in (q_THD, k_THD, v_THD))
    for x in (q_THD, k_THD, v_THD, state_HVK):
        assert x.stride(-1) == 1, f"heads of a chunk: strides {x.stride()}"
        assert x.dtype == torch.float32, f"chunk in {x.dtype}: expected float32"
    assert state_HVK.stride(1) == dim, f"state: strides {state_HVK.stride()}"
    g, beta = g_THD.contiguous(), beta_TH.contiguous()
    blocks = triton.cdiv(n_tokens, BLOCK)
    make = {"dtype": torch.float32, "device": q_THD.device}
    scratch = torch.empty(blocks, heads, _floats(dim), **make)
    o = torch.empty(n_tokens, heads, dim, **make)
    final = torch.empty(heads, dim, dim, **make)
    sizes = {"D": dim, "BLOCK": BLOCK, "FLOATS": _floats(dim)}
    factored = lower_bound is not None and lower_bound >= MILDEST
    channels, prepare_warps = (tuning.channels, tuning.prepare_warps) if factored else PLAIN
    _prepare[(blocks, heads)](
        q_THD,
        k_THD,
        g,
        beta,
        scratch,
        q_THD.stride(0),
        q_THD.stride(1),
        k_THD.stride(0),
        k_THD.stride(1),
        n_tokens,
        heads,
        CHANNELS=min(channels, dim),
        FACTORED=factored,
        num_warps=prepare_warps,
        **sizes,
    )
    rows = min(tuning.rows, dim)
    _scan[(heads, dim // rows)](
        v_THD,
        scratch,
        state_HVK,
        o,
        final,
        v_THD.stride(0),
        v_THD.stride(1),
        state_HVK.stride(0),
        n_tokens,
        heads,
        ROWS=rows,
        STAGES=tuning.stages,
        num_warps=tuning.warps,
        **sizes,
    )
    return o, final
