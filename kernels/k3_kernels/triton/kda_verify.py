"""KDA verify of a whole group as one block, replay form: one read of the state, one write, no state per token.

First the accepted prefix of the last group is folded into the state (a product of the recorded deltas with the recorded,
decayed keys), then the new group is treated at once. With G_i the running log decay of the group,
P = S (exp(G_i) k_i), R = S (exp(G_i) q_i), both matrix products on the state:

    M[i,j] = beta_i k_i.(exp(G_i - G_j) k_j), j < i        U = (I + M)^-1 diag(beta) (V - P)
    A[i,j] = q_i.(exp(G_i - G_j) k_j), j <= i              O = R + A U

Keys and queries of a token are neighbours (rows 2i and 2i + 1 of one tile of R rows), so that everything up to the last
product is done once for both: (I + A)(I + M)^-1 turns V - P into U (even columns) and A U (odd columns).
U, K and g are the group's records. Products are three of tf32: float32 up to the last bits.

Two launches. `_prepare`, one warp for a head, does everything that is per token and leaves it in a scratch; it needs
few registers, so that many are under way at once. `_apply` streams the state. In one kernel every warp that multiplies
a small matrix would compute it again, and its registers would leave room for two programs on a processor: measured
2.66 ms where the two take a small fraction. What a program overwrites (records, inputs) it alone has read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.reference.group import GroupCache, GroupRule
from k3_kernels.triton.kda_prepare import convolved, keep_inputs, log_decay

LARGEST_EXPONENT = 60.0  # exp(-G) stays a normal float32, so exp(G_i - G_j) may be taken apart
DEPTH = 32  # channels of a product at once: few registers


@triton.jit
def _product(a, b):
    """a @ b in float32 precision from three tf32 products. (The compiler's own tf32x3 also looks for NaN and infinity
    in every element, which costs more than the products.)
    """
    a_large = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    b_large = (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    c = tl.dot(a - a_large, b_large, input_precision="tf32")
    c = tl.dot(a_large, b - b_large, c, input_precision="tf32")
    return tl.dot(a_large, b_large, c, input_precision="tf32")


@triton.jit
def _recorded(record, old, read_column, channel, N: tl.constexpr, D: tl.constexpr):
    """Keys of the records 0 .. read_column, each decayed by what follows it, and below them the decay of all."""
    following = tl.zeros([D], dtype=tl.float32)
    for j in tl.static_range(N - 1, -1, -1):
        at = record + j * D + channel
        k = tl.load(at, mask=j <= read_column, other=0.0).to(tl.float32)
        tl.store(old + j * D + channel, k * tl.exp(following))
        following += tl.load(at + 2 * N * D, mask=j <= read_column, other=0.0).to(tl.float32)
    tl.store(old + N * D + channel, tl.exp(following))


@triton.jit
def _earlier(
    q, k, total, keys, totals, token: tl.constexpr, channel, D: tl.constexpr, R: tl.constexpr
):
    """Rows 2 token and 2 token + 1 of the pairs, one by one: only differences <= 0 are exponentiated."""
    i, j = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    rows = tl.zeros([R, R], dtype=tl.float32)
    for s in tl.static_range(token + 1):
        since = tl.exp(total - tl.load(totals + s * D + channel))
        key = tl.load(keys + s * D + channel) * since
        here = j == 2 * s
        rows += tl.where(here & (i == 2 * token), tl.sum(k * key, 0), 0.0)
        rows += tl.where(here & (i == 2 * token + 1), tl.sum(q * key, 0), 0.0)
    return rows


@triton.jit
def _solution(pairs, beta, G: tl.constexpr, R: tl.constexpr):
    """(I + A)(I + M)^-1 [R, R]: row 2i belongs to key i, row 2i + 1 to query i.

    M is strictly triangular over G tokens, so its alternating series is the finite product
    (I - M)(I + M^2)(I + M^4).. up to a power of at least G.
    """
    i, j = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    earlier = (j % 2 == 0) & (j < i)
    m = tl.where(earlier & (i % 2 == 0), pairs * beta[:, None], 0.0)
    a = tl.where(earlier & (i % 2 == 1), pairs, 0.0)
    solution = tl.where(i == j, 1.0, 0.0) - m
    if G > 2:
        m = _product(m, m)
        solution += _product(solution, m)
    if G > 4:
        m = _product(m, m)
        solution += _product(solution, m)
    if G > 8:
        m = _product(m, m)
        solution += _product(solution, m)
    return solution + _product(a, solution)


@triton.jit
def _prepare(
    u_ptr,
    raw_ptr,
    beta_ptr,
    weight_ptr,
    bias_ptr,
    decay_ptr,
    windows_ptr,
    tails_ptr,
    records_ptr,
    slots_ptr,
    read_column_ptr,
    scratch_ptr,
    u_row,
    u_token,
    u_head,
    raw_row,
    raw_token,
    beta_row,
    beta_token,
    window_slot,
    window_head,
    tail_slot,
    tail_head,
    record_slot,
    record_head,
    heads,
    lower_bound,
    eps,
    scale,
    G: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    TAIL: tl.constexpr,
    R: tl.constexpr,
    BOUNDED: tl.constexpr,
    FACTORED: tl.constexpr,
    FLOATS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    item = tl.program_id(0)
    row, head = (item // heads).to(tl.int64), (item % heads).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    read_column = tl.load(read_column_ptr + row).to(tl.int32)
    first = tl.maximum(read_column, 0)
    channel, pair = tl.arange(0, D), tl.arange(0, R)
    inputs = u_ptr + row * u_row + head * u_head
    window = windows_ptr + slot * window_slot + head * window_head
    tail = tails_ptr + slot * tail_slot + head * tail_head
    weight = weight_ptr + head * (3 * D * W)
    record = records_ptr + slot * record_slot + head * record_head
    wide: tl.constexpr = D * (W - 1)
    # Scratch (`_layout`): keys and queries grown by exp(G), values, recorded keys and decay, the solution; for this
    # kernel alone, keys shrunk by exp(-G) (or plain) and G.
    grown = scratch_ptr + item.to(tl.int64) * FLOATS
    values, old = grown + 2 * G * D, grown + 3 * G * D
    answer = old + (N + 1) * D
    shrunk, totals = answer + R * R, answer + R * R + G * D

    _recorded(record, old, read_column, channel, N, D)
    bias = tl.load(bias_ptr + head * D + channel).to(tl.float32)
    decay = tl.load(decay_ptr + head).to(tl.float32)
    total = tl.zeros([D], dtype=tl.float32)
    pairs = tl.zeros([R, R], dtype=tl.float32)
    for t in tl.static_range(G):
        q = convolved(inputs, u_token, window, tail, weight, first, channel, t, D, W, TAIL)
        k = convolved(
            inputs + D,
            u_token,
            window + wide,
            tail + TAIL * D,
            weight + D * W,
            first,
            channel,
            t,
            D,
            W,
            TAIL,
        )
        v = convolved(
            inputs + 2 * D,
            u_token,
            window + 2 * wide,
            tail + 2 * TAIL * D,
            weight + 2 * D * W,
            first,
            channel,
            t,
            D,
            W,
            TAIL,
        )
        q *= tl.rsqrt(tl.sum(q * q, 0) + eps) * scale
        k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
        raw = tl.load(raw_ptr + row * raw_row + t * raw_token + head * D + channel)
        g = log_decay(raw.to(tl.float32) + bias, decay, lower_bound, BOUNDED)
        total += g
        growth = tl.exp(total)
        tl.store(record + t * D + channel, k.to(records_ptr.dtype.element_ty))
        tl.store(record + (2 * N + t) * D + channel, g.to(records_ptr.dtype.element_ty))
        tl.store(grown + 2 * t * D + channel, k * growth)
        tl.store(grown + (2 * t + 1) * D + channel, q * growth)
        tl.store(values + t * D + channel, v)
        if FACTORED:
            tl.store(shrunk + t * D + channel, k * tl.exp(-total))
        else:
            tl.store(shrunk + t * D + channel, k)
            tl.store(totals + t * D + channel, total)
            pairs += _earlier(q, k, total, shrunk, totals, t, channel, D, R)
    for part in tl.static_range(3):
        keep_inputs(
            inputs + part * D,
            u_token,
            window + part * wide,
            tail + part * TAIL * D,
            first,
            channel,
            G,
            D,
            W,
            TAIL,
        )

    token = pair // 2
    is_key = (pair % 2 == 0) & (token < G)
    if FACTORED:
        tl.debug_barrier()  # the rows are complete
        for start in tl.range(0, D, CHANNELS, num_stages=1):
            deep = start + tl.arange(0, CHANNELS)
            left = tl.load(
                grown + pair[:, None] * D + deep[None, :], mask=(token < G)[:, None], other=0.0
            )
            right = tl.load(
                shrunk + token[None, :] * D + deep[:, None], mask=is_key[None, :], other=0.0
            )
            pairs += _product(left, right)
    beta = tl.load(beta_ptr + row * beta_row + token * beta_token + head, mask=is_key, other=0.0)
    beta = tl.where(is_key, tl.sigmoid(beta.to(tl.float32)), 0.0)
    solution = _solution(pairs, beta, G, R) * beta[None, :]
    tl.store(answer + pair[:, None] * R + pair[None, :], solution)


@triton.jit
def _apply(
    o_ptr,
    states_ptr,
    records_ptr,
    slots_ptr,
    read_column_ptr,
    scratch_ptr,
    state_slot,
    state_head,
    record_slot,
    record_head,
    heads,
    G: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    FLOATS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles: tl.constexpr = D // ROWS
    item, start = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * ROWS
    row, head = (item // heads).to(tl.int64), (item % heads).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    read_column = tl.load(read_column_ptr + row).to(tl.int32)
    pair, value = tl.arange(0, R), start + tl.arange(0, ROWS)
    token = pair // 2
    live = token < G
    is_key = (pair % 2 == 0) & live
    state = states_ptr + slot * state_slot + head * state_head + value[:, None] * D
    delta = records_ptr + slot * record_slot + head * record_head + N * D + value[:, None]
    grown = scratch_ptr + item.to(tl.int64) * FLOATS
    values, old = grown + 2 * G * D, grown + 3 * G * D
    answer = old + (N + 1) * D

    known = (pair <= read_column)[None, :]
    old_u = tl.load(delta + pair[None, :] * D, mask=known, other=0.0).to(tl.float32)
    seen = tl.zeros([ROWS, R], dtype=tl.float32)  # P and R
    for at in tl.range(0, D, CHANNELS, num_stages=STAGES):
        channel = at + tl.arange(0, CHANNELS)
        s = tl.load(state + channel[None, :]).to(tl.float32)
        old_k = tl.load(
            old + pair[:, None] * D + channel[None, :], mask=(pair < N)[:, None], other=0.0
        )
        kq = tl.load(grown + pair[None, :] * D + channel[:, None], mask=live[None, :], other=0.0)
        s = s * tl.load(old + N * D + channel)[None, :] + _product(old_u, old_k)
        tl.store(state + channel[None, :], s.to(states_ptr.dtype.element_ty))
        seen += _product(s, kq)
    aimed = tl.load(values + token[None, :] * D + value[:, None], mask=is_key[None, :], other=0.0)
    solution = tl.load(answer + pair[None, :] * R + pair[:, None])  # transposed
    both = _product(aimed - seen, solution)  # U and A U
    tl.debug_barrier()  # every thread has read the old deltas
    tl.store(
        delta + token[None, :] * D, both.to(records_ptr.dtype.element_ty), mask=is_key[None, :]
    )
    out = o_ptr + ((row * G + token)[None, :] * heads + head) * D + value[:, None]
    o = (both + seen).to(o_ptr.dtype.element_ty)
    tl.store(out, o, mask=(live & (pair % 2 == 1))[None, :])


def _padded(group: int) -> int:
    return 16 if group <= 8 else 32


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tile of `_apply` (value rows, channels at once, chunks under way, warps) and warps of `_prepare`."""

    rows: int
    channels: int
    stages: int
    warps: int
    prepare_warps: int


TUNED = Tuning(
    rows=128, channels=32, stages=1, warps=4, prepare_warps=1
)  # the best of four on an H200


def verify(
    u_BGHSD: Tensor,
    raw_BGHD: Tensor,
    beta_BGH: Tensor,
    rule: GroupRule,
    cache: GroupCache,
    slots_B: Tensor,
    read_column_B: Tensor,
    out_BGHD: Tensor,
    tuning: Tuning = TUNED,
) -> None:
    """One group per row: writes o, and the rows' states, records, windows and tails. `reference.group.verify`."""
    n_rows, group, heads, _, dim = u_BGHSD.shape
    records = cache.records
    assert records is not None, "the block form keeps records"
    bound = rule.lower_bound
    kept = records.shape[3]
    padded = _padded(max(group, kept))
    floats = (5 * group + kept + 1) * dim + padded * padded
    scratch = torch.empty(n_rows * heads * floats, dtype=torch.float32, device=u_BGHSD.device)
    _prepare[(n_rows * heads,)](
        u_BGHSD,
        raw_BGHD,
        beta_BGH,
        rule.conv_HSDw,
        rule.bias_HD,
        rule.decay_H,
        cache.windows,
        cache.tails,
        records,
        slots_B,
        read_column_B,
        scratch,
        *u_BGHSD.stride()[:3],
        *raw_BGHD.stride()[:2],
        *beta_BGH.stride()[:2],
        *cache.windows.stride()[:2],
        *cache.tails.stride()[:2],
        *records.stride()[:2],
        heads,
        0.0 if bound is None else bound,
        rule.eps,
        dim**-0.5,
        G=group,
        N=kept,
        D=dim,
        W=rule.conv_HSDw.shape[-1],
        TAIL=cache.tails.shape[-2],
        R=padded,
        BOUNDED=bound is not None,
        FACTORED=bound is not None and -bound * group <= LARGEST_EXPONENT,
        FLOATS=floats,
        CHANNELS=min(DEPTH, dim),
        num_warps=tuning.prepare_warps,
        num_stages=1,
    )
    rows = min(tuning.rows, dim)
    _apply[(n_rows * heads * (dim // rows),)](
        out_BGHD,
        cache.states,
        records,
        slots_B,
        read_column_B,
        scratch,
        *cache.states.stride()[:2],
        *records.stride()[:2],
        heads,
        G=group,
        N=kept,
        D=dim,
        R=padded,
        FLOATS=floats,
        ROWS=rows,
        CHANNELS=min(tuning.channels, dim),
        STAGES=tuning.stages,
        num_warps=tuning.warps,
        num_stages=1,
    )
