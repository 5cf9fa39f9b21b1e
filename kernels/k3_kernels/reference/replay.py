"""KDA verify, replay form: one committed state per slot, and what the newest group would do to it.

Snapshots (`kda.verify`) keep a state per group token. This form leaves the state before the group in its slot and
keeps a record of every group token: key k, delta u and log decay g. With u recorded instead of v and beta, a state is

    S_a = S diag(exp G_a) + sum over j <= a of u_j (exp(G_a - G_j) k_j)^T,   G_i = g_0 + .. + g_i

so any accepted prefix can be folded in without another forward. That happens when the next group comes: `verify` first
folds the records `0 .. read_column` of each row into its state, then checks the new group and overwrites the records.
Nothing is undone and no state is copied; a rejected token is a record that nobody folds.

The fold repeats the recurrence's own operations on the recorded values, so both forms give the same bits. A kernel may
use the closed form above; it then agrees up to rounding.

Bytes of a request of Kimi-K3 (69 layers, 96 heads of 128 x 128, float32, all ranks together): a state is 414 MiB, so
snapshots of groups of 8 take 3.2 GiB; records take 3 x 128 x 4 bytes per head, layer and token: 77.6 MiB for 8.

Letters: B rows, G group tokens, N tokens that fit into the records (>= G), H heads, D head dim (V value, K key side).
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.reference import kda

KEY, DELTA, DECAY = range(3)  # order of a record's parts


def fold(state_BHVK: Tensor, records_BHPND: Tensor, read_column_B: Tensor) -> None:
    """Bring the records 0 .. read_column of each row into its state, in place; -1 folds nothing.

    Records beyond are not looked at: they may hold anything.
    """
    for t in range(records_BHPND.shape[3]):
        ignored = (read_column_B < t).view(-1, 1, 1, 1)
        k, u, g = records_BHPND[:, :, :, t].masked_fill(ignored, 0).unbind(2)
        kda.decay(state_BHVK, g)
        kda.add(state_BHVK, k, u)


def verify(
    q_BGHD: Tensor,
    k_BGHD: Tensor,
    v_BGHD: Tensor,
    g_BGHD: Tensor,
    beta_BGH: Tensor,
    states: Tensor,
    records: Tensor,
    slots_B: Tensor,
    read_column_B: Tensor,
) -> Tensor:
    """One group per row. Returns o [B, G, H, D].

    states: [slots, H, V, K], the state before the newest group; records: [slots, H, 3 (k, u, g), N, D] of that group.
    Slot `slots_B[b]` gets its records 0 .. `read_column_B[b]` folded into its state (-1: the slot was just filled, its
    records are another request's), then its records 0 .. G - 1 overwritten.
    """
    state = states.index_select(0, slots_B).to(q_BGHD.dtype)
    fold(state, records.index_select(0, slots_B).to(state.dtype), read_column_B)
    states.index_copy_(0, slots_B, state.to(states.dtype))
    outputs: list[Tensor] = []
    for t in range(q_BGHD.shape[1]):
        k, g = k_BGHD[:, t], g_BGHD[:, t]
        u = kda.advance(state, k, v_BGHD[:, t], g, beta_BGH[:, t])
        outputs.append(kda.read(state, q_BGHD[:, t]))
        records[:, :, :, t].index_copy_(0, slots_B, torch.stack((k, u, g), 2).to(records.dtype))
    return torch.stack(outputs, 1)
