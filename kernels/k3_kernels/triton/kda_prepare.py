"""What every KDA kernel does with a token before the state is touched: convolution, gate, and the inputs it keeps.

Device functions only. A program owns one head of one row, a thread some of the head's D channels, so that what a
thread overwrites it alone has read. Memory of a head: windows [3, D, W - 1], tails [3, TAIL, D], weights [3, W, D].
`token` and `tap` are compile-time numbers; the pointers passed in are those of one section (q, k or v).
"""

import triton
import triton.language as tl


@triton.jit
def fetch(at, N: tl.constexpr):
    """Bring N elements (a multiple of 16 bytes) into the L2: one thread asks, nobody waits. Compute capability 9."""
    tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t; .reg .b64 a; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; and.b64 a, $1, -16;
        @p cp.async.bulk.prefetch.L2.global [a], $2; mov.u32 $0, 0; }""",
        "=r,l,r",
        [at, N * at.dtype.element_ty.primitive_bitwidth // 8],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def log_decay(raw, decay, lower_bound, BOUNDED: tl.constexpr):
    """Log decay per channel from the raw gate (bias added); `decay` is exp(A_log) of the head."""
    if BOUNDED:
        return lower_bound * tl.sigmoid(decay * raw)
    # softplus without overflow: max(x, 0) + log(1 + exp(-|x|))
    return -decay * (tl.maximum(raw, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(raw))))


@triton.jit
def past_input(window, tail, column, channel, D: tl.constexpr, W: tl.constexpr, TAIL: tl.constexpr):
    """Input `column` of window ++ tail, float32 [channels]; nothing else is read."""
    kept: tl.constexpr = W - 1
    x = tl.load(window + channel * kept + column, mask=column < kept, other=0.0).to(tl.float32)
    if TAIL > 0:
        at = tail + (column - kept) * D + channel
        x += tl.load(at, mask=column >= kept, other=0.0).to(tl.float32)
    return x


@triton.jit
def convolved(
    inputs,
    stride_token,
    window,
    tail,
    weight,
    first,
    channel,
    token: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Silu of the causal convolution at a token of the group: float32 [channels].

    first: column of window ++ tail that holds the oldest input in reach of token 0.
    """
    y = tl.zeros([channel.shape[0]], dtype=tl.float32)
    for tap in tl.static_range(W):
        w = tl.load(weight + tap * D + channel).to(tl.float32)
        if token + tap - (W - 1) >= 0:
            at = inputs + (token + tap - (W - 1)) * stride_token + channel
            y += w * tl.load(at).to(tl.float32)
        else:
            y += w * past_input(window, tail, first + token + tap, channel, D, W, TAIL)
    return y * tl.sigmoid(y)


@triton.jit
def keep_inputs(
    inputs,
    stride_token,
    window,
    tail,
    first,
    channel,
    G: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Leave what the next group may need: the window after token 0, the inputs of the others in the tail.

    In this order each input is read before its place is overwritten.
    """
    kept: tl.constexpr = W - 1
    tl.debug_barrier()
    for c in tl.static_range(W - 2):
        x = past_input(window, tail, first + c + 1, channel, D, W, TAIL)
        tl.store(window + channel * kept + c, x.to(window.dtype.element_ty))
    x = tl.load(inputs + channel)
    tl.store(window + channel * kept + kept - 1, x.to(window.dtype.element_ty))
    tl.debug_barrier()
    for t in tl.static_range(1, G):
        x = tl.load(inputs + t * stride_token + channel)
        tl.store(tail + (t - 1) * D + channel, x.to(tail.dtype.element_ty))
