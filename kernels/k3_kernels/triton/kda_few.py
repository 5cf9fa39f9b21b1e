"""What verify does per token where there are fewer heads than processors: `kda_tokens` with more asked for at once.

All that is read is asked for together, products take their tiles from where they are, three parts side by side. On
Hopper the launch asks for what it and `_apply` read later, and `_apply` starts beside it. Letters as in `kda_tokens`.
"""

import triton
import triton.language as tl

from k3_kernels.triton.kda_prepare import fetch, log_decay
from k3_kernels.triton.kda_solution import small_product, solution_of
from k3_kernels.triton.kda_tokens import one_by_one, recorded


@triton.jit
def _convolved(
    inputs, u_token, past, weight, t, channel, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr
):
    """Silu of the causal convolution, float32 [T, D]; and the inputs of the group."""
    y = tl.zeros([t.shape[0], D], dtype=tl.float32)
    for tap in tl.static_range(W):
        c = t + tap - (W - 1)
        at = inputs + c[:, None] * u_token + channel[None, :]
        x = tl.load(at, mask=((t < G) & (c >= 0))[:, None], other=0.0)
        at = past + (c + W - 1)[:, None] * D + channel[None, :]
        x += tl.load(at, mask=(c < 0)[:, None], other=0.0)
        w = tl.load(weight + tap * D + channel[None, :] + 0 * t[:, None])
        y += w.to(tl.float32) * x.to(tl.float32)
    return y * tl.sigmoid(y), x


@triton.jit
def _taken_apart(k, q, shrunk, D: tl.constexpr, R: tl.constexpr):
    """`kda_solution.taken_apart` of tiles at hand, [T, D], parts of the channels side by side."""
    parts: tl.constexpr = 4 if D >= 64 else 1
    left = tl.join(k, q).permute(0, 2, 1).reshape(R, parts, D // parts)
    right = tl.join(shrunk, tl.zeros_like(shrunk)).permute(0, 2, 1).reshape(R, parts, D // parts)
    return tl.sum(small_product(left.permute(1, 0, 2), right.permute(1, 2, 0)), 0)


@triton.jit
def prepare_few(
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
    states_ptr,
    state_slot,
    state_head,
    past_ptr,
    G: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    TAIL: tl.constexpr,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    BOUNDED: tl.constexpr,
    FACTORED: tl.constexpr,
    FLOATS: tl.constexpr,
    HOPPER: tl.constexpr,
):
    """Scratch of a head: keys and queries grown by exp(G), values, recorded keys and their decay, the solution; for
    `one_by_one` alone, plain keys and G.
    """
    item = tl.program_id(0).to(tl.int64)
    row, head = item // heads, item % heads
    slot = tl.load(slots_ptr + row)
    read_column = tl.load(read_column_ptr + row).to(tl.int32)
    first = tl.maximum(read_column, 0)
    T: tl.constexpr = R // 2
    wide: tl.constexpr = D * (W - 1)
    channel, pair, t = tl.arange(0, D), tl.arange(0, R), tl.arange(0, T)
    live = (t < G)[:, None]
    inputs = u_ptr + row * u_row + head * u_head
    window = windows_ptr + slot * window_slot + head * window_head
    tail = tails_ptr + slot * tail_slot + head * tail_head
    weight = weight_ptr + head * (3 * D * W)
    record = records_ptr + slot * record_slot + head * record_head
    grown, past = scratch_ptr + item * FLOATS, past_ptr + item * (3 * wide)
    values, old = grown + 2 * G * D, grown + 3 * G * D
    answer = old + (N + 1) * D
    shrunk, totals = answer + R * R, answer + R * R + G * D
    if HOPPER:
        tl.extra.cuda.gdc_launch_dependents()  # `_apply` waits where it needs this launch
        fetch(weight, 3 * D * W)
        for token in tl.static_range(G):
            fetch(inputs + token * u_token, 3 * D)
        fetch(record, 3 * N * D)
        fetch(states_ptr + slot * state_slot + head * state_head, D * D)
        tl.debug_barrier()  # or the compiler puts it off

    # The inputs before token 0 that the convolution reaches: `first` .. of window ++ tail.
    part, c = tl.arange(0, 4 * COLUMNS) // COLUMNS, tl.arange(0, 4 * COLUMNS) % COLUMNS
    column, wanted = first + c, (part < 3) & (c < W - 1)
    windows = window + part[:, None] * wide + channel[None, :] * (W - 1)
    at = tail + (part * TAIL + column - (W - 1))[:, None] * D + channel[None, :]
    x = tl.load(at, mask=(wanted & (column >= W - 1))[:, None], other=0.0)
    x += tl.load(windows + column[:, None], mask=(wanted & (column < W - 1))[:, None], other=0.0)
    to_past = past + (part * (W - 1) + c)[:, None] * D + channel[None, :]
    tl.store(to_past, x, mask=wanted[:, None])
    at = raw_ptr + row * raw_row + t[:, None] * raw_token + head * D + channel[None, :]
    raw = tl.load(at, mask=live, other=0.0).to(tl.float32)
    raw += tl.load(bias_ptr + head * D + channel[None, :] + 0 * t[:, None]).to(tl.float32)
    decay = tl.load(decay_ptr + head).to(tl.float32)
    token = pair // 2
    is_key = (pair % 2 == 0) & (token < G)
    beta = tl.load(beta_ptr + row * beta_row + token * beta_token + head, mask=is_key, other=0.0)
    recorded(record, old, read_column, channel, N, D, T)
    tl.debug_barrier()  # the past inputs are there

    q, own_q = _convolved(inputs, u_token, past, weight, t, channel, G, D, W)
    k, own_k = _convolved(inputs + D, u_token, past + wide, weight + D * W, t, channel, G, D, W)
    v, own_v = _convolved(
        inputs + 2 * D, u_token, past + 2 * wide, weight + 2 * D * W, t, channel, G, D, W
    )
    # The windows after token 0.
    kept = tl.load(to_past + D, mask=(wanted & (c < W - 2))[:, None], other=0.0)
    at = inputs + part[:, None] * D + channel[None, :] + 0 * c[:, None]
    kept += tl.load(at, mask=(wanted & (c == W - 2))[:, None], other=0.0)
    q *= (tl.rsqrt(tl.sum(q * q, 1) + eps) * scale)[:, None]
    k *= tl.rsqrt(tl.sum(k * k, 1) + eps)[:, None]
    g = tl.where(live, log_decay(raw, decay, lower_bound, BOUNDED), 0.0)
    total = tl.cumsum(g, 0)
    growth = tl.exp(total)
    at = t[:, None] * D + channel[None, :]
    grown_k, grown_q = k * growth, q * growth
    tl.store(grown + at + t[:, None] * D, grown_k, mask=live)
    tl.store(grown + at + (t[:, None] + 1) * D, grown_q, mask=live)
    if not FACTORED:
        tl.store(shrunk + at, k, mask=live)
        tl.store(totals + at, total, mask=live)
    tl.debug_barrier()  # the rows are complete, and what is overwritten below has been read
    if FACTORED:
        pairs = _taken_apart(grown_k, grown_q, tl.where(live, k * tl.exp(-total), 0.0), D, R)
    else:
        pairs = one_by_one(q, k, total, shrunk, totals, t, channel, G, D, R)
    tl.store(record + at, k.to(records_ptr.dtype.element_ty), mask=live)
    tl.store(record + 2 * N * D + at, g.to(records_ptr.dtype.element_ty), mask=live)
    tl.store(values + at, v, mask=live)
    tl.store(windows + c[:, None], kept.to(windows_ptr.dtype.element_ty), mask=wanted[:, None])
    others, to = live & (t > 0)[:, None], tail + at - D
    tl.store(to, own_q.to(tails_ptr.dtype.element_ty), mask=others)
    tl.store(to + TAIL * D, own_k.to(tails_ptr.dtype.element_ty), mask=others)
    tl.store(to + 2 * TAIL * D, own_v.to(tails_ptr.dtype.element_ty), mask=others)
    beta = tl.where(is_key, tl.sigmoid(beta.to(tl.float32)), 0.0)
    solution = solution_of(pairs, beta, G, R) * beta[None, :]
    tl.store(answer + pair[:, None] * R + pair[None, :], solution)
