"""Kimi Delta Attention: gate, recurrence, chunked form, and verify with one state per token (snapshots).

State per head is V-first, `S[v, k]`, wide dtype. One token: S decays per key channel by exp(g), then
`u = beta (v - S k)`, `S += u k^T`, `o = S q`: decay first, the delta uses the decayed state, the output
the updated one. q and k arrive L2-normalised (q also scaled), g in log space.
The other form of verify, replay, is `replay.py`.

Letters: T tokens, B rows, G group tokens, H heads, D head dim (K key side, V value side), C tokens of a
tile, n tiles.  Golden: k3/components.safetensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.reference.precision import constant

TILE = 16  # tokens handled at once; small, because a tile holds a C x C x D decay tensor per head
TILES_AT_ONCE = 32  # bounds the memory of the in-tile part


def gate(raw_THD: Tensor, decay_H: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay per channel, <= 0. raw: projection plus dt_bias; decay_H: exp(A_log); both wide."""
    decay = decay_H.unsqueeze(-1)
    if lower_bound is None:
        return -decay * torch.nn.functional.softplus(raw_THD)
    return torch.sigmoid(decay * raw_THD) * constant(lower_bound, raw_THD)


def l2_normalize(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + constant(eps, x))


def advance(
    state_BHVK: Tensor, k_BHD: Tensor, v_BHD: Tensor, g_BHD: Tensor, beta_BH: Tensor
) -> Tensor:
    """One token of each row into its state, in place. Returns the delta u [B, H, V]."""
    decay(state_BHVK, g_BHD)
    k = k_BHD.unsqueeze(-1)
    u = (v_BHD.unsqueeze(-1) - state_BHVK @ k) * beta_BH.view(*beta_BH.shape, 1, 1)
    add(state_BHVK, k_BHD, u.squeeze(-1))
    return u.squeeze(-1)


def decay(state_BHVK: Tensor, g_BHD: Tensor) -> None:
    """S <- S diag(exp g), in place."""
    state_BHVK.mul_(g_BHD.exp().unsqueeze(-2))


def add(state_BHVK: Tensor, k_BHD: Tensor, u_BHV: Tensor) -> None:
    """S <- S + u k^T, in place."""
    state_BHVK.addcmul_(u_BHV.unsqueeze(-1), k_BHD.unsqueeze(-2))


def read(state_BHVK: Tensor, q_BHD: Tensor) -> Tensor:
    """S q: [B, H, V]."""
    return (state_BHVK @ q_BHD.unsqueeze(-1)).squeeze(-1)


def step(
    state_BHVK: Tensor, q_BHD: Tensor, k_BHD: Tensor, v_BHD: Tensor, g_BHD: Tensor, beta_BH: Tensor
) -> Tensor:
    """One token of each row; updates the state in place, returns o [B, H, D]."""
    advance(state_BHVK, k_BHD, v_BHD, g_BHD, beta_BH)
    return read(state_BHVK, q_BHD)


def recurrent(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, g_THD: Tensor, beta_TH: Tensor, state_HVK: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token over one sequence. Returns o [T, H, D] and the final state (a new tensor)."""
    state = state_HVK.clone().unsqueeze(0)
    o = torch.empty_like(v_THD)
    for t in range(q_THD.shape[0]):
        at = slice(t, t + 1)
        o[t] = step(state, q_THD[at], k_THD[at], v_THD[at], g_THD[at], beta_TH[at])[0]
    return o, state[0]


def chunk(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, g_THD: Tensor, beta_TH: Tensor, state_HVK: Tensor
) -> tuple[Tensor, Tensor]:
    """The same as `recurrent`, tile by tile. Returns o [T, H, D] and the final state (a new tensor)."""
    n_tokens = q_THD.shape[0]
    state = state_HVK.transpose(1, 2).clone()  # [H, K, V]
    outputs: list[Tensor] = []
    whole = n_tokens - n_tokens % TILE
    for lo in range(0, whole, TILE * TILES_AT_ONCE):
        hi = min(lo + TILE * TILES_AT_ONCE, whole)
        o, state = _tiles(q_THD, k_THD, v_THD, g_THD, beta_TH, state, lo, hi, TILE)
        outputs.append(o)
    if whole < n_tokens:
        rest = n_tokens - whole
        o, state = _tiles(q_THD, k_THD, v_THD, g_THD, beta_TH, state, whole, n_tokens, rest)
        outputs.append(o)
    return torch.cat(outputs), state.transpose(1, 2).contiguous()


def _tiles(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    g_THD: Tensor,
    beta_TH: Tensor,
    state_HKV: Tensor,
    lo: int,
    hi: int,
    tile: int,
) -> tuple[Tensor, Tensor]:
    """Tokens lo..hi in tiles of `tile`. Only decays between two tokens of a tile are exponentiated.

    With G the running sum of g in a tile: M[i,j] = beta_i k_i.k_j exp(G_i - G_j) for j < i,
    V' = (I + M)^-1 diag(beta) (V - (exp(G) K) S0), O = (exp(G) q) S0 + Q V',
    S1 = exp(G_C) S0 + (exp(G_C - G) K)^T V'.
    """

    def tiles(x: Tensor) -> Tensor:  # [n, H, C, D]
        return x[lo:hi].unflatten(0, (-1, tile)).transpose(1, 2)

    q, k, v, g = tiles(q_THD), tiles(k_THD), tiles(v_THD), tiles(g_THD)
    beta = tiles(beta_TH.unsqueeze(-1))  # [n, H, C, 1]
    total = g.cumsum(2)
    later = torch.ones(tile, tile, dtype=torch.bool, device=q.device).triu(1)
    between = total.unsqueeze(3) - total.unsqueeze(2)  # [n, H, C, C, D], i then j
    decayed_k = between.masked_fill_(later.unsqueeze(-1), float("-inf")).exp_().mul_(k.unsqueeze(2))
    inner, attend = (decayed_k @ torch.stack((k, q), -1)).unbind(-1)  # [n, H, C, C], j <= i
    inner = inner * beta
    grown = total.exp()
    weighted = torch.cat((v, grown * k), -1) * beta
    solved = torch.linalg.solve_triangular(inner, weighted, upper=False, unitriangular=True)
    value, reach = solved.split((v.shape[-1], k.shape[-1]), -1)
    query = grown * q
    tail = (total[:, :, -1:] - total).exp() * k
    final = grown[:, :, -1].unsqueeze(-1)  # [n, H, K, 1]
    outputs: list[Tensor] = []
    for i in range(q.shape[0]):
        fresh = value[i] - reach[i] @ state_HKV
        outputs.append(query[i] @ state_HKV + attend[i] @ fresh)
        state_HKV = final[i] * state_HKV + tail[i].transpose(1, 2) @ fresh
    o = torch.stack(outputs)  # [n, H, C, D]
    return o.transpose(1, 2).flatten(0, 1), state_HKV


def verify(
    q_BGHD: Tensor,
    k_BGHD: Tensor,
    v_BGHD: Tensor,
    g_BGHD: Tensor,
    beta_BGH: Tensor,
    states: Tensor,
    slots_B: Tensor,
    read_column_B: Tensor,
    columns: int,
) -> Tensor:
    """One group per row, every token's state kept. Returns o [B, G, H, D].

    states: [slots * columns, H, V, K]; row b starts from column `read_column_B[b]` of slot
    `slots_B[b]` (-1: the slot was just filled, its state lies in column 0) and leaves the state after
    group token t in column t.
    """
    first = slots_B * columns
    # A copy, because the source column may be overwritten below.
    state = states.index_select(0, first + read_column_B.clamp(min=0)).to(q_BGHD.dtype)
    outputs: list[Tensor] = []
    for t in range(q_BGHD.shape[1]):
        outputs.append(
            step(state, q_BGHD[:, t], k_BGHD[:, t], v_BGHD[:, t], g_BGHD[:, t], beta_BGH[:, t])
        )
        states.index_copy_(0, first + t, state.to(states.dtype))
    return torch.stack(outputs, 1)
