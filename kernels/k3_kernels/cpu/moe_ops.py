"""Expert choice and routed experts on CPUs by the native library. Rules of `k3_kernels.reference.moe`.

Other dtypes than float32 and float64, and experts unpacked per use, go to the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3_kernels.cpu.calls import DTYPES, pair, rows
from k3_kernels.cpu.dense import Packed
from k3_kernels.cpu.layer_ops import NativeMoeBlock, are_packed
from k3_kernels.layers import MoeLayer
from k3_kernels.reference import moe
from k3_kernels.reference.moe import DenseExperts, ExpertWeights, Routing


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """Experts as they came and packed for few tokens each (`src/gemm.h`)."""

    plain: DenseExperts
    w13_packed: Packed
    w2_packed: Packed

    @property
    def first(self) -> int:
        """Global id of the first expert held here."""
        return self.plain.first

    @property
    def count(self) -> int:
        """Experts held here."""
        return self.plain.count

    def w13(self, expert: int) -> Tensor:
        """A view."""
        return self.plain.w13(expert)

    def w2(self, expert: int) -> Tensor:
        """A view."""
        return self.plain.w2(expert)


class NativeMoe:
    """`api.MoeOps`."""

    def __init__(self) -> None:
        """Raises LibraryError."""
        self._route, self._experts = pair("k3_route"), pair("k3_experts")

    def require(self, dtype: torch.dtype) -> None:
        """Everything can be computed."""

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """Packed beside what torch multiplies with."""
        if not isinstance(weights, DenseExperts) or weights.w13_EFZ.dtype not in DTYPES:
            return weights
        return NativeExperts(weights, Packed.of(weights.w13_EFZ), Packed.of(weights.w2_EZF))

    def route(
        self, x_TD: Tensor, gate_ED: Tensor, bias_E: Tensor, rule: Routing
    ) -> tuple[Tensor, Tensor]:
        """`reference.moe.route`; equal scores go to the expert of the lower id."""
        if x_TD.dtype not in DTYPES or gate_ED.dtype != x_TD.dtype:
            return moe.route(x_TD, gate_ED, bias_E, rule)
        x = rows(x_TD)
        n_tokens, width = x.shape
        n_experts = gate_ED.shape[0]
        ids = x.new_empty(n_tokens, rule.top_k, dtype=torch.int64)
        weight = x.new_empty(n_tokens, rule.top_k)
        self._route[x.dtype](
            *(x.data_ptr(), x.stride(0), gate_ED.data_ptr(), bias_E.data_ptr(), ids.data_ptr()),
            *(weight.data_ptr(), n_tokens, n_experts, width, rule.top_k, rule.n_groups),
            *(rule.top_groups, rule.activation == "softmax", rule.renormalize, rule.scaling),
        )
        return ids, weight

    def experts(
        self,
        z_TZ: Tensor,
        ids_Tk: Tensor,
        weight_Tk: Tensor,
        weights: ExpertWeights,
        beta: float,
        linear_beta: float | None,
    ) -> Tensor:
        """`reference.moe.experts`; a token's choices are added in their order."""
        if not isinstance(weights, NativeExperts) or weight_Tk.dtype != z_TZ.dtype:
            return moe.experts(z_TZ, ids_Tk, weight_Tk, weights, beta, linear_beta)
        z, ids, weight = rows(z_TZ), ids_Tk.contiguous(), weight_Tk.contiguous()
        up, down = weights.w13_packed, weights.w2_packed
        n_experts, width, inner = weights.plain.w2_EZF.shape
        y = z.new_empty(z.shape)
        self._experts[z.dtype](
            *(z.data_ptr(), z.stride(0), ids.data_ptr(), weight.data_ptr()),
            *(weights.plain.first, n_experts, up.data.data_ptr(), up.is_narrow),
            *(down.data.data_ptr(), down.is_narrow, *ids.shape, width, inner),
            *(beta, linear_beta or 0.0, y.data_ptr()),
        )
        return y

    def block(self, layer: MoeLayer) -> NativeMoeBlock | None:
        """One call for a whole feed-forward, where experts and projections are packed."""
        shared = (layer.shared_gate_up, layer.shared_down)
        experts = layer.experts
        if not isinstance(experts, NativeExperts):
            return None
        if not are_packed(layer.down, layer.up, *shared) or experts.count != len(layer.gate_ED):
            return None
        return NativeMoeBlock(layer, experts.w13_packed, experts.w2_packed)
