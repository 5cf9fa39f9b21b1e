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

from k3_kernels.reference.mxfp4 import unpack
from k3_kernels.reference.norm import situ

GATHER_LIMIT = (
    8  # up to so many (token, expert) pairs copying the weights beats a loop over experts
)


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
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
    return ids, weight * rule.scaling


def _limit_groups(biased_TE: Tensor, rule: Routing) -> Tensor:
    """Keep the groups with the largest sum of their two best scores; the others become -inf."""
    grouped = biased_TE.unflatten(-1, (rule.n_groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    chosen = best.topk(rule.top_groups, -1).indices
    dropped = torch.ones_like(best, dtype=torch.bool).scatter_(-1, chosen, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)


class ExpertWeights(Protocol):
    """Weights of the experts `first .. first + count - 1`."""

    @property
    def first(self) -> int:
        """Global id of the first expert held here."""
        ...

    @property
    def count(self) -> int:
        """Experts held here."""
        ...

    def take(self, experts: Tensor | int) -> tuple[Tensor, Tensor]:
        """w13 [.., 2F, Z] (gate rows, then up rows) and w2 [.., Z, F] of local expert index(es)."""
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

    def take(self, experts: Tensor | int) -> tuple[Tensor, Tensor]:
        """Rows of the stacked weights."""
        return self.w13_EFZ[experts], self.w2_EZF[experts]


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

    def take(self, experts: Tensor | int) -> tuple[Tensor, Tensor]:
        """Unpack the chosen experts."""
        return (
            unpack(self.w13_packed[experts], self.w13_scale[experts], self.dtype),
            unpack(self.w2_packed[experts], self.w2_scale[experts], self.dtype),
        )


def experts(
    z_TZ: Tensor,
    ids_Tk: Tensor,
    weight_Tk: Tensor,
    weights: ExpertWeights,
    beta: float,
    linear_beta: float | None,
) -> Tensor:
    """Weighted sum of the chosen experts this rank holds. Returns [T, Z] in the wide dtype."""
    local = ids_Tk - weights.first
    held = (local >= 0) & (local < weights.count)
    if ids_Tk.numel() <= GATHER_LIMIT:
        y = _gathered(z_TZ, local.clamp(0, weights.count - 1), weights, beta, linear_beta)
    else:
        y = _looped(z_TZ, local.masked_fill(~held, weights.count), weights, beta, linear_beta)
    weight = weight_Tk.masked_fill(~held, 0).unsqueeze(1)  # [T, 1, k]
    return (weight @ y.to(weight.dtype)).squeeze(1)


def _gathered(
    z_TZ: Tensor, local_Tk: Tensor, weights: ExpertWeights, beta: float, linear_beta: float | None
) -> Tensor:
    """One batched product over copies of the chosen weights: no host work, for few pairs."""
    w13, w2 = weights.take(local_Tk.flatten())
    z = z_TZ.repeat_interleave(local_Tk.shape[1], 0).unsqueeze(-1)
    gate, up = torch.bmm(w13, z).squeeze(-1).chunk(2, -1)
    y = torch.bmm(w2, situ(gate, up, beta, linear_beta).unsqueeze(-1))
    return y.view(*local_Tk.shape, -1)


def _looped(
    z_TZ: Tensor, local_Tk: Tensor, weights: ExpertWeights, beta: float, linear_beta: float | None
) -> Tensor:
    """Tokens grouped by expert, one pair of products per expert in use. Reads counts on the host.

    local_Tk: index of the expert among those held here; `weights.count` for experts held elsewhere.
    """
    flat = local_Tk.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=weights.count + 1).tolist()
    grouped = z_TZ[torch.div(order, local_Tk.shape[1], rounding_mode="floor")]
    y = z_TZ.new_zeros(flat.shape[0], z_TZ.shape[1])
    lo = 0
    for expert, count in enumerate(counts[:-1]):
        if count == 0:
            continue
        hi = lo + count
        w13, w2 = weights.take(expert)
        gate, up = torch.nn.functional.linear(grouped[lo:hi], w13).chunk(2, -1)
        y[order[lo:hi]] = torch.nn.functional.linear(situ(gate, up, beta, linear_beta), w2)
        lo = hi
    return y.view(*local_Tk.shape, -1)
