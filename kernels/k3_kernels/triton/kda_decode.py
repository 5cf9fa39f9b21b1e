"""KDA decode of one token: convolution, gate and recurrence in one pass over the state.

One program owns one head of one row. It prepares q, k and the gate once, then streams the state through in tiles of
value rows, which are independent of each other. Each byte of the state is read once and written once, the floor.

With the decay taken into the vectors, both products use the state as read:
    u = beta (v - S (e k)),  o = S (e q) + (k.q) u,  S <- S diag(e) + u k^T,  e = exp(g)
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.reference.group import GroupCache, GroupRule
from k3_kernels.triton.kda_prepare import convolved, keep_inputs, log_decay


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
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    row, head = (pid // heads).to(tl.int64), (pid % heads).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    channel = tl.arange(0, D)
    state = states_ptr + slot * state_slot + head * state_head
    inputs = u_ptr + row * u_row + head * u_head
    window = windows_ptr + slot * window_slot + head * window_head
    weight = weight_ptr + head * (3 * D * W)
    section: tl.constexpr = D * (W - 1)
    q = convolved(inputs, 0, window, window, weight, 0, channel, 0, D, W, 0)
    k = convolved(inputs + D, 0, window + section, window, weight + D * W, 0, channel, 0, D, W, 0)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + eps) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + eps)
    raw = tl.load(raw_ptr + row * raw_row + head * D + channel).to(tl.float32)
    raw += tl.load(bias_ptr + head * D + channel).to(tl.float32)
    g = log_decay(raw, tl.load(decay_ptr + head).to(tl.float32), lower_bound, BOUNDED)
    e = tl.exp(g)
    beta = tl.sigmoid(tl.load(beta_ptr + row * beta_row + head).to(tl.float32))
    kq = tl.sum(k * q, 0)
    k_decayed, q_decayed = k * e, q * e

    tl.debug_barrier()  # every thread has read the windows of q and k
    keep_inputs(inputs, 0, window, window, 0, channel, 1, D, W, 0)
    keep_inputs(inputs + D, 0, window + section, window, 0, channel, 1, D, W, 0)
    v_inputs, v_window = inputs + 2 * D, window + 2 * section

    for start in tl.range(0, D, ROWS, num_stages=STAGES):
        value = start + tl.arange(0, ROWS)
        tile = state + value[:, None] * D + channel[None, :]
        s = tl.load(tile).to(tl.float32)
        v = convolved(v_inputs, 0, v_window, window, weight + 2 * D * W, 0, value, 0, D, W, 0)
        u = (v - tl.sum(s * k_decayed[None, :], 1)) * beta
        o = tl.sum(s * q_decayed[None, :], 1) + kq * u
        s = s * e[None, :] + u[:, None] * k[None, :]
        tl.store(tile, s.to(states_ptr.dtype.element_ty))
        tl.store(o_ptr + pid.to(tl.int64) * D + value, o.to(o_ptr.dtype.element_ty))
        keep_inputs(v_inputs, 0, v_window, window, 0, value, 1, D, W, 0)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Value rows of a tile, tiles under way, warps of a program."""

    rows: int
    stages: int
    warps: int


def tuned(programs: int) -> Tuning:
    """As measured on an H200 (132 processors): many programs want to be small, few must be wide."""
    return Tuning(8, 4, 1) if programs > 2048 else Tuning(32, 1, 8)


def decode(
    u_BHSD: Tensor,
    raw_BHD: Tensor,
    beta_BH: Tensor,
    rule: GroupRule,
    cache: GroupCache,
    slots_B: Tensor,
    out_BHD: Tensor,
    tuning: Tuning | None = None,
) -> None:
    """One token of each row: writes o, states (columns = 1) and windows. `reference.group.verify`."""
    n_rows, heads, _, dim = u_BHSD.shape
    chosen = tuning or tuned(n_rows * heads)
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
        STAGES=chosen.stages,
        num_warps=chosen.warps,
    )
