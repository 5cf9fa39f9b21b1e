"""What verify does per token where there are few heads: all tokens of a head at once, as one tile.

Convolution, normalisation and gate of the new tokens, their triangular solution, the recorded keys of the last group,
and what is kept for the next. All that is read is asked for before anything is overwritten, so that a program waits
for memory twice and not once a token. Results go to a scratch for `kda_verify`, whose `_apply` starts beside this on Hopper.

Letters: G tokens of the group, N recorded ones, T rows of a tile (a power of two), R = 2 T, D channels, W taps. Memory
of a head: windows [3, D, W - 1], tails [3, TAIL, D], weights [3, W, D], past inputs [3, W - 1, D].
"""

import triton
import triton.language as tl

from k3_kernels.triton.kda_prepare import fetch, log_decay
from k3_kernels.triton.kda_solution import solution_of, taken_apart


@triton.jit
def recorded(record, old, read_column, channel, N: tl.constexpr, D: tl.constexpr, T: tl.constexpr):
    """Keys of the records 0 .. read_column, each decayed by what follows it, and below them the decay of all."""
    j = T - 1 - tl.arange(0, T)  # the newest first, so that a running sum is of what follows
    known = (j < N) & (j <= read_column)
    later = (j + 1 < N) & (j + 1 <= read_column)
    at = record + j[:, None] * D + channel[None, :]
    k = tl.load(at, mask=known[:, None], other=0.0).to(tl.float32)
    g = tl.load(at + 2 * N * D, mask=known[:, None], other=0.0).to(tl.float32)
    next_g = tl.load(at + (2 * N + 1) * D, mask=later[:, None], other=0.0).to(tl.float32)
    k *= tl.exp(tl.cumsum(next_g, 0))
    tl.store(old + j[:, None] * D + channel[None, :], k, mask=(j < N)[:, None])
    tl.store(old + N * D + channel, tl.exp(tl.sum(g, 0)))


@triton.jit
def _past(
    window,
    tail,
    past,
    first,
    channel,
    D: tl.constexpr,
    W: tl.constexpr,
    TAIL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Inputs `first` .. of window ++ tail that the convolution of the new tokens reaches; nothing else is read."""
    c = tl.arange(0, COLUMNS)
    column, needed = first + c, c < W - 1
    at = window + channel[None, :] * (W - 1) + column[:, None]
    x = tl.load(at, mask=(needed & (column < W - 1))[:, None], other=0.0)
    if TAIL > 0:
        at = tail + (column - (W - 1))[:, None] * D + channel[None, :]
        x += tl.load(at, mask=(needed & (column >= W - 1))[:, None], other=0.0)
    tl.store(past + c[:, None] * D + channel[None, :], x, mask=needed[:, None])


@triton.jit
def _convolved(
    inputs, u_token, past, weight, t, channel, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr
):
    """Silu of the causal convolution, float32 [T, D]."""
    y = tl.zeros([t.shape[0], D], dtype=tl.float32)
    for tap in tl.static_range(W):
        c = t + tap - (W - 1)
        at = inputs + c[:, None] * u_token + channel[None, :]
        x = tl.load(at, mask=((t < G) & (c >= 0))[:, None], other=0.0)
        at = past + (c + W - 1)[:, None] * D + channel[None, :]
        x += tl.load(at, mask=(c < 0)[:, None], other=0.0)
        y += tl.load(weight + tap * D + channel).to(tl.float32)[None, :] * x.to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def _keep(
    inputs,
    u_token,
    past,
    window,
    tail,
    t,
    channel,
    G: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Leave what the next group may need: the window after token 0, the inputs of the others in the tail."""
    c = tl.arange(0, COLUMNS)
    at = past + (c + 1)[:, None] * D + channel[None, :]
    x = tl.load(at, mask=(c < W - 2)[:, None], other=0.0)
    newest = inputs + 0 * c[:, None] + channel[None, :]
    x += tl.load(newest, mask=(c == W - 2)[:, None], other=0.0)
    at = window + channel[None, :] * (W - 1) + c[:, None]
    tl.store(at, x.to(window.dtype.element_ty), mask=(c < W - 1)[:, None])
    others = ((t > 0) & (t < G))[:, None]
    x = tl.load(inputs + t[:, None] * u_token + channel[None, :], mask=others, other=0.0)
    tl.store(
        tail + (t - 1)[:, None] * D + channel[None, :], x.to(tail.dtype.element_ty), mask=others
    )


@triton.jit
def one_by_one(
    q, k, total, keys, totals, t, channel, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr
):
    """The same where exp(-G) might overflow: only differences <= 0 are exponentiated."""
    pair = tl.arange(0, R)
    pairs = tl.zeros([R, R], dtype=tl.float32)
    for s in tl.static_range(G):
        since = tl.where((t >= s)[:, None], total - tl.load(totals + s * D + channel)[None, :], 0.0)
        key = tl.load(keys + s * D + channel)[None, :] * tl.exp(since)
        both = tl.join(tl.sum(k * key, 1), tl.sum(q * key, 1)).reshape([R])
        here = (pair == 2 * s)[None, :] & (pair // 2 >= s)[:, None]
        pairs += tl.where(here, both[:, None], 0.0)
    return pairs


@triton.jit
def prepare_tile(
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
    CHANNELS: tl.constexpr,
    HOPPER: tl.constexpr,
):
    """Scratch of a head: keys and queries grown by exp(G), values, recorded keys and their decay, the solution; for
    this kernel alone, keys shrunk by exp(-G) (or plain) and G.
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
        for i in tl.static_range(G):
            fetch(inputs + i * u_token, 3 * D)

    for part in tl.static_range(3):
        from_window, from_tail = window + part * wide, tail + part * TAIL * D
        _past(from_window, from_tail, past + part * wide, first, channel, D, W, TAIL, COLUMNS)
    at = raw_ptr + row * raw_row + t[:, None] * raw_token + head * D + channel[None, :]
    raw = tl.load(at, mask=live, other=0.0).to(tl.float32)
    recorded(record, old, read_column, channel, N, D, T)
    tl.debug_barrier()  # what is overwritten below has been read, the past inputs are there

    q = _convolved(inputs, u_token, past, weight, t, channel, G, D, W)
    k = _convolved(inputs + D, u_token, past + wide, weight + D * W, t, channel, G, D, W)
    q *= (tl.rsqrt(tl.sum(q * q, 1) + eps) * scale)[:, None]
    k *= tl.rsqrt(tl.sum(k * k, 1) + eps)[:, None]
    raw += tl.load(bias_ptr + head * D + channel).to(tl.float32)[None, :]
    decay = tl.load(decay_ptr + head).to(tl.float32)
    g = tl.where(live, log_decay(raw, decay, lower_bound, BOUNDED), 0.0)
    total = tl.cumsum(g, 0)
    growth = tl.exp(total)
    at = t[:, None] * D + channel[None, :]
    tl.store(grown + at + t[:, None] * D, k * growth, mask=live)
    tl.store(grown + at + (t[:, None] + 1) * D, q * growth, mask=live)
    tl.store(shrunk + at, k * tl.exp(-total) if FACTORED else k, mask=live)
    if not FACTORED:
        tl.store(totals + at, total, mask=live)
    tl.store(record + at, k.to(records_ptr.dtype.element_ty), mask=live)
    tl.store(record + 2 * N * D + at, g.to(records_ptr.dtype.element_ty), mask=live)
    v = _convolved(
        inputs + 2 * D, u_token, past + 2 * wide, weight + 2 * D * W, t, channel, G, D, W
    )
    tl.store(values + at, v, mask=live)
    tl.debug_barrier()  # the rows are complete

    if FACTORED:
        pairs = taken_apart(grown, shrunk, G, D, R, CHANNELS)
    else:
        pairs = one_by_one(q, k, total, shrunk, totals, t, channel, G, D, R)
    token = pair // 2
    is_key = (pair % 2 == 0) & (token < G)
    beta = tl.load(beta_ptr + row * beta_row + token * beta_token + head, mask=is_key, other=0.0)
    beta = tl.where(is_key, tl.sigmoid(beta.to(tl.float32)), 0.0)
    solution = solution_of(pairs, beta, G, R) * beta[None, :]
    tl.store(answer + pair[:, None] * R + pair[None, :], solution)
    for part in tl.static_range(3):
        to_window, to_tail = window + part * wide, tail + part * TAIL * D
        here, before = inputs + part * D, past + part * wide
        _keep(here, u_token, before, to_window, to_tail, t, channel, G, D, W, COLUMNS)
