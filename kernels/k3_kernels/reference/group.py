"""A KDA layer between its projections: convolution, normalisation, gate, recurrence.

The two operations a backend fuses: `chunks` for prefill, `verify` for verify groups. Both compose the references of
their parts and are what kernels are held against.

Letters: T tokens, B rows, G group tokens, H heads, S sections (q, k, v), D head dim, w convolution width,
N records of a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from k3_kernels.reference import conv, kda, replay
from k3_kernels.reference.precision import constant


@dataclass(frozen=True, slots=True)
class GroupRule:
    """The constants of a layer, wide dtype.

    conv_HSDw: convolution weights. bias_HD: added to the raw gate. decay_H: exp(A_log).
    lower_bound: of the log decay; None: a softplus gate. eps: of the q and k normalisation.
    """

    conv_HSDw: Tensor
    bias_HD: Tensor
    decay_H: Tensor
    lower_bound: float | None
    eps: float


@dataclass(frozen=True, slots=True)
class GroupCache:
    """What a layer keeps between steps: `k3.model.batch.StageCaches`, of one layer.

    records None: snapshots, `columns` states per slot.
    """

    states: Tensor
    windows: Tensor
    tails: Tensor
    columns: int
    records: Tensor | None


def split_heads(y: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Convolved [..., H, S, D] -> q (normalised, scaled by D^-1/2), k (normalised), v."""
    qk = kda.l2_normalize(y[..., :2, :], eps)
    return qk[..., 0, :] * constant(y.shape[-1] ** -0.5, y), qk[..., 1, :], y[..., 2, :]


class ChunkSpan(NamedTuple):
    """One request's tokens `lo .. hi - 1` of a batch: from the state in slot `read` (-1: zeros) to slot `write`."""

    lo: int
    hi: int
    read: int
    write: int


Delta = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def chunks(
    u_THSD: Tensor,
    raw_THD: Tensor,
    beta_TH: Tensor,
    rule: GroupRule,
    cache: GroupCache,
    spans: Sequence[ChunkSpan],
    delta: Delta = kda.chunk,
) -> Tensor:
    """Chunks that cover all T tokens in order. Returns o [T, H, D], wide; fills the windows and states written to.

    u: convolution inputs. raw: decay gate before the bias. beta: before the sigmoid.
    delta: the delta rule over one request's q, k, v, g, beta and state, `kda.chunk`.
    """
    g = kda.gate(raw_THD.to(rule.bias_HD.dtype) + rule.bias_HD, rule.decay_H, rule.lower_bound)
    beta = torch.sigmoid(beta_TH.to(g.dtype))
    outputs: list[Tensor] = []
    for lo, hi, read, write in spans:
        window, state = cache.windows[read], cache.states[read * cache.columns]
        if read < 0:
            window, state = torch.zeros_like(window), torch.zeros_like(state)
        y, window = conv.chunk(u_THSD[lo:hi], rule.conv_HSDw, window)
        q, k, v = split_heads(y, rule.eps)
        o, state = delta(q, k, v, g[lo:hi], beta[lo:hi], state.to(q.dtype))
        cache.windows[write] = window.to(cache.windows.dtype)
        cache.states[write * cache.columns] = state.to(cache.states.dtype)
        outputs.append(o)
    return torch.cat(outputs)


def verify(
    u_BGHSD: Tensor,
    raw_BGHD: Tensor,
    beta_BGH: Tensor,
    rule: GroupRule,
    cache: GroupCache,
    slots_B: Tensor,
    read_column_B: Tensor,
) -> Tensor:
    """One group per row from its read column (-1: the slot was just filled). Returns o [B, G, H, D], wide.

    u: convolution inputs. raw: decay gate before the bias. beta: before the sigmoid.
    Overwrites the rows' windows, tails, states and records.
    """
    g = kda.gate(raw_BGHD.to(rule.bias_HD.dtype) + rule.bias_HD, rule.decay_H, rule.lower_bound)
    beta = torch.sigmoid(beta_BGH.to(g.dtype))
    y = conv.verify(u_BGHSD, rule.conv_HSDw, cache.windows, cache.tails, slots_B, read_column_B)
    group = (*split_heads(y, rule.eps), g, beta)
    if cache.records is None:
        return kda.verify(*group, cache.states, slots_B, read_column_B, cache.columns)
    return replay.verify(*group, cache.states, cache.records, slots_B, read_column_B)
