"""KDA decode of one token: convolution, gate and recurrence in one pass over the state.

One program owns one head of one row. It prepares q, k and the gate once, then streams the state through in tiles of
value rows, which are independent of each other. Each byte of the state is read once and written once, the floor.

With the decay taken into the vectors, both products use the state as read:
    u = beta (v - S (e k)),  o = S (e q) + (k.q) u,  S <- S diag(e) + u k^T,  e = exp(g)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.reference.group import GroupCache, GroupRule
from k3_kernels.triton.kda_prepare import convolved, fetch, keep_inputs, log_decay


@triton.jit
def _all_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def _decode(
    u_ptr,
    raw_ptr,
    beta_ptr,
    o_ptr,
    weight_ptr,
    bias_ptr,
    decay_ptr,
    states_ptr,
    windows_ptr,
    slots_ptr,
    u_row,
    u_head,
    raw_row,
    beta_row,
    state_slot,
    state_head,
    window_slot,
    window_head,
    heads,
    lower_bound,
    eps,
    scale,
    D: tl.constexpr,
    W: tl.constexpr,
    BOUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    FETCH: tl.constexpr,
):
    pid = tl.program_id(0)
    row, head = (pid // heads).to(tl.int64), (pid % heads).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    channel = tl.arange(0, D)
    raw = tl.load(raw_ptr + row * raw_row + head * D + channel).to(tl.float32)
    bias = tl.load(bias_ptr + head * D + channel).to(tl.float32)
    decay = tl.load(decay_ptr + head).to(tl.float32)
    beta = tl.load(beta_ptr + row * beta_row + head).to(tl.float32)
    state = states_ptr + slot * state_slot + head * state_head
    if FETCH:
        fetch(state, D * D)
    first = state + tl.arange(0, ROWS)[:, None] * D + channel[None, :]
    # Under way while the token is prepared, as each next tile while one is computed.
    ahead = tl.load(first)
    tl.debug_barrier()  # or the compiler asks for all this later
    inputs = u_ptr + row * u_row + head * u_head
    window = windows_ptr + slot * window_slot + head * window_head
    weight = weight_ptr + head * (3 * D * W)
    section: tl.constexpr = D * (W - 1)
    q = convolved(inputs, 0, window, window, weight, 0, channel, 0, D, W, 0)
    k = convolved(inputs + D, 0, window + section, window, weight + D * W, 0, channel, 0, D, W, 0)
    v = convolved(
        inputs + 2 * D, 0, window + 2 * section, window, weight + 2 * D * W, 0, channel, 0, D, W, 0
    )
    out = o_ptr + pid.to(tl.int64) * D
    tl.store(out + channel, v)  # waits there for its tile
    qq, kk, kq = tl.reduce((q * q, k * k, k * q), 0, _all_three)
    of_q, of_k = tl.rsqrt(qq + eps) * scale, tl.rsqrt(kk + eps)
    q, k, kq = q * of_q, k * of_k, kq * of_q * of_k
    e = tl.exp(log_decay(raw + bias, decay, lower_bound, BOUNDED))
    beta = tl.sigmoid(beta)
    k_decayed, q_decayed = k * e, q * e
    tl.debug_barrier()  # every thread has read the windows, and v is there
    v_ahead = tl.load(out + tl.arange(0, ROWS))
    for part in tl.static_range(3):
        keep_inputs(inputs + part * D, 0, window + part * section, window, 0, channel, 1, D, W, 0)

    for start in tl.static_range(0, D, ROWS):
        s, aimed = ahead.to(tl.float32), v_ahead
        value = start + tl.arange(0, ROWS)
        if start + ROWS < D:
            ahead = tl.load(first + (start + ROWS) * D)
            v_ahead = tl.load(out + ROWS + value)
        u = (aimed - tl.sum(s * k_decayed[None, :], 1)) * beta
        o = tl.sum(s * q_decayed[None, :], 1) + kq * u
        s = s * e[None, :] + u[:, None] * k[None, :]
        tl.store(first + start * D, s.to(states_ptr.dtype.element_ty))
        tl.store(out + value, o)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Value rows of a tile, warps of a program; fetch: a program asks for its whole state at once (Hopper)."""

    rows: int
    warps: int
    fetch: bool = False


def tuned(programs: int, *, hopper: bool = False) -> Tuning:
    """As measured on an H200: asking for the state helps where there are fewer programs than its 132 processors."""
    return Tuning(32, 4, fetch=hopper and programs <= 132)


def decode(
    u_BHSD: Tensor,
    raw_BHD: Tensor,
    beta_BH: Tensor,
    rule: GroupRule,
    cache: GroupCache,
    slots_B: Tensor,
    out_BHD: Tensor,
    tuning: Tuning | None = None,
    *,
    hopper: bool = False,
) -> None:
    """One token of each row: writes o (float32), states (columns = 1) and windows. `reference.group.verify`."""
    n_rows, heads, _, dim = u_BHSD.shape
    chosen = tuning or tuned(n_rows * heads, hopper=hopper)
    assert out_BHD.dtype == torch.float32, f"o in {out_BHD.dtype}: v waits there in float32"
    _decode[(n_rows * heads,)](
        u_BHSD,
        raw_BHD,
        beta_BH,
        out_BHD,
        rule.conv_HSDw,
        rule.bias_HD,
        rule.decay_H,
        cache.states,
        cache.windows,
        slots_B,
        u_BHSD.stride(0),
        u_BHSD.stride(1),
        raw_BHD.stride(0),
        beta_BH.stride(0),
        cache.states.stride(0),
        cache.states.stride(1),
        cache.windows.stride(0),
        cache.windows.stride(1),
        heads,
        0.0 if rule.lower_bound is None else rule.lower_bound,
        rule.eps,
        dim**-0.5,
        D=dim,
        W=rule.conv_HSDw.shape[-1],
        BOUNDED=rule.lower_bound is not None,
        ROWS=min(chosen.rows, dim),
        FETCH=chosen.fetch,
        num_warps=chosen.warps,
    )
