"""Mixture of experts: choosing experts per token, and running the chosen ones.

The weight of an expert multiplies its output after the activation-dtype rounding; the sum over experts
is taken in the wide dtype and in the order of the choice, so it does not depend on which other tokens
are in the step. Expert weights come as `DenseExperts` or as `PackedExperts` (MXFP4, unpacked per use).

Letters: T tokens, D hidden size, E experts of this rank, k experts per token, Z expert input and
output width, F expert inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from k3_kernels.reference.mxfp4 import unpack
from k3_kernels.reference.norm import situ
from k3_kernels.reference.precision import constant


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts."""

    top_k: int
    activation: str  # "sigmoid" | "softmax"
    renormalize: bool
    scaling: float
    n_groups: int = 1
    top_groups: int = 1


def route(x_TD: Tensor, gate_ED: Tensor, bias_E: Tensor, rule: Routing) -> tuple[Tensor, Tensor]:
    """Expert ids [T, k] (int64) and weights [T, k] (wide). gate and bias are wide.

    The bias takes part in the choice only, never in the weight.
    """
    logits = x_TD.to(gate_ED.dtype) @ gate_ED.t()
    score = torch.sigmoid(logits) if rule.activation == "sigmoid" else torch.softmax(logits, -1)
    biased = score + bias_E
    if rule.n_groups > rule.top_groups:
        biased = _limit_groups(biased, rule)
    ids = biased.topk(rule.top_k, -1, sorted=False).indices
    weight = score.gather(-1, ids)
    if rule.renormalize and rule.top_k > 1:
        weight = weight / (weight.sum(-1, keepdim=True) + constant(1e-20, weight))
    return ids, weight * constant(rule.scaling, weight)


def _limit_groups(biased_TE: Tensor, rule: Routing) -> Tensor:
    """Keep the groups with the largest sum of their two best scores; the others become -inf."""
    grouped = biased_TE.unflatten(-1, (rule.n_groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    chosen = best.topk(rule.top_groups, -1).indices
    dropped = torch.ones_like(best, dtype=torch.bool).scatter_(-1, chosen, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)


class ExpertWeights(Protocol):
    """Weights of the experts `first .. first + count - 1`; methods take the index among those held."""

    @property
    def first(self) -> int:
        """Global id of the first expert held here."""
        ...

    @property
    def count(self) -> int:
        """Experts held here."""
        ...

    def w13(self, expert: int) -> Tensor:
        """Gate rows, then up rows: [2F, Z]."""
        ...

    def w2(self, expert: int) -> Tensor:
        """Down projection: [Z, F]."""
        ...


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """Unquantised, or dequantised once at load."""

    first: int
    w13_EFZ: Tensor  # [E, 2F, Z]
    w2_EZF: Tensor

    @property
    def count(self) -> int:
        """Experts held here."""
        return self.w13_EFZ.shape[0]

    def w13(self, expert: int) -> Tensor:
        """A view."""
        return self.w13_EFZ[expert]

    def w2(self, expert: int) -> Tensor:
        """A view."""
        return self.w2_EZF[expert]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """MXFP4, unpacked to `dtype` for the experts a step uses."""

    first: int
    w13_packed: Tensor
    w13_scale: Tensor
    w2_packed: Tensor
    w2_scale: Tensor
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """Experts held here."""
        return self.w13_packed.shape[0]

    def w13(self, expert: int) -> Tensor:
        """Unpacked now."""
        return unpack(self.w13_packed[expert], self.w13_scale[expert], self.dtype)

    def w2(self, expert: int) -> Tensor:
        """Unpacked now."""
        return unpack(self.w2_packed[expert], self.w2_scale[expert], self.dtype)


def experts(
    z_TZ: Tensor,
    ids_Tk: Tensor,
    weight_Tk: Tensor,
    weights: ExpertWeights,
    beta: float,
    linear_beta: float | None,
) -> Tensor:
    """Weighted sum of the chosen experts this rank holds. Returns [T, Z] in the wide dtype.

    Pairs (token, choice) are grouped by expert: one pair of products per expert in use, everything
    else once. Reads the group sizes on the host.
    """
    n_tokens, top_k = ids_Tk.shape
    local = (ids_Tk - weights.first).flatten()
    # Experts held elsewhere sort behind all of ours and contribute zero.
    local = local.masked_fill((local < 0) | (local >= weights.count), weights.count)
    order = local.argsort(stable=True)
    spans = _spans(torch.bincount(local, minlength=weights.count + 1).tolist()[:-1])
    y = z_TZ.new_zeros(n_tokens * top_k, z_TZ.shape[1])
    if spans:
        order = order[: spans[-1][2]]
        token = torch.div(order, top_k, rounding_mode="floor")
        grouped = z_TZ.index_select(0, token)
        inner = torch.cat([linear(grouped[lo:hi], weights.w13(e)) for e, lo, hi in spans])
        gate, up = inner.chunk(2, -1)
        active = situ(gate, up, beta, linear_beta)
        outputs = torch.cat([linear(active[lo:hi], weights.w2(e)) for e, lo, hi in spans])
        y.index_copy_(0, order, outputs)
    y_TkZ = y.view(n_tokens, top_k, -1).to(weight_Tk.dtype)
    return (weight_Tk.unsqueeze(1) @ y_TkZ).squeeze(1)


def _spans(counts: list[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, row after the last) of every expert in use, rows in expert order."""
    spans: list[tuple[int, int, int]] = []
    lo = 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, lo, lo + count))
            lo += count
    return spans
