"""What verify does per token where there are many heads: one warp for a head, token after token, so that many run at once.

The same as `kda_tokens`, in a third of the instructions of all warps together; a program waits for memory once a token.
"""

import triton
import triton.language as tl

from k3_kernels.triton.kda_prepare import convolved, keep_inputs, log_decay
from k3_kernels.triton.kda_solution import solution_of, taken_apart


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
def prepare_each(
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
    """Scratch of a head: keys and queries grown by exp(G), values, recorded keys and their decay, the solution; for
    this kernel alone, keys shrunk by exp(-G) (or plain) and G.
    """
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
        pairs = taken_apart(grown, shrunk, G, D, R, CHANNELS)
    beta = tl.load(beta_ptr + row * beta_row + token * beta_token + head, mask=is_key, other=0.0)
    beta = tl.where(is_key, tl.sigmoid(beta.to(tl.float32)), 0.0)
    solution = solution_of(pairs, beta, G, R) * beta[None, :]
    tl.store(answer + pair[:, None] * R + pair[None, :], solution)
