"""Feed-forward of MoE layers: router, routed experts in the latent space, shared experts.

The router reads the full-width input; routed experts read a down-projection of it. The norm between
the experts' sum and the up-projection is nonlinear, so partial sums of expert-parallel ranks are
reduced before it; the shared experts' partial sum is reduced after.

Letters: T tokens, D hidden size, E experts of this rank, Z expert width, F expert inner width.
"""

from __future__ import annotations

import torch
from k3_kernels.api import Ops
from k3_kernels.layers import MoeLayer, gate, moe_block
from k3_kernels.reference.moe import DenseExperts, ExpertWeights, PackedExperts, Routing
from k3_kernels.reference.mxfp4 import unpack
from torch import Tensor

from k3.errors import ModelError
from k3.model.layers import GatedMlp, wide
from k3.model.names import expert_name
from k3.model.spec import K3Spec
from k3.model.weights import Weights
from k3.parallel.collectives import Collectives
from k3.parallel.mesh import Place


class Moe:
    """One layer's experts."""

    def __init__(
        self,
        spec: K3Spec,
        place: Place,
        comm: Collectives,
        ops: Ops,
        weights: Weights,
        layer: int,
        moe_weights: str,
    ) -> None:
        """moe_weights: `dequant` (unpack MXFP4 once, now) or `packed` (unpack per use)."""
        moe = spec.moe
        self.spec, self.situ, self.eps = moe, spec.situ, spec.rms_norm_eps
        self.ops, self.dense, self.comm = ops.moe, ops.dense, comm
        self.dtype = weights.dtype
        ops.moe.require(weights.dtype)
        prefix = f"model.layers.{layer}.block_sparse_moe."
        acc = wide(weights.dtype)
        self.gate = gate(ops.moe, weights.take(f"{prefix}gate.weight", dtype=acc))
        self.bias = weights.take(f"{prefix}gate.e_score_correction_bias", dtype=acc)
        self.rule = Routing(
            moe.top_k, moe.router, moe.renormalize, moe.scaling, moe.n_groups, moe.top_groups
        )
        self.experts = ops.moe.prepare(load_experts(spec, place, weights, layer, moe_weights))
        self.shared = None
        if moe.n_shared:
            shared = f"{prefix}shared_experts."
            self.shared = GatedMlp(weights, shared, spec.situ, place.shard, ops.dense)
        if moe.latent is not None:
            down = weights.take(f"{prefix}routed_expert_down_proj.weight")
            up = weights.take(f"{prefix}routed_expert_up_proj.weight")
            self.down, self.up = ops.dense.projection(down), ops.dense.projection(up)
        if moe.latent_norm:
            self.norm = weights.take(f"{prefix}routed_expert_norm.weight")
        self.block = moe_block(ops.moe, self._whole()) if comm.size == 1 else None

    def _whole(self) -> MoeLayer:
        is_latent, shared = self.spec.latent is not None, self.shared
        return MoeLayer(
            *(self.gate, self.bias, self.rule, self.down if is_latent else None, self.experts),
            *(self.situ.beta, self.situ.linear_beta),
            *(self.norm if self.spec.latent_norm else None, self.eps),
            self.up if is_latent else None,
            shared.gate_up if shared else None,
            shared.down if shared else None,
        )

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [T, k] and weights [T, k] (wide)."""
        return self.ops.route(x_TD, self.gate, self.bias, self.rule)

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """What the layer adds, each [T, D] and complete on every rank of the shard group.

        Routed experts, then shared ones; one output where one operation computes the layer.
        """
        if self.block is not None and len(x_TD) <= self.block.most_tokens:
            return (self.block(x_TD),)
        ids, weight = self.route(x_TD)
        z = x_TD if self.spec.latent is None else self.down(x_TD)
        routed = self.ops.experts(
            z, ids, weight, self.experts, self.situ.beta, self.situ.linear_beta
        )
        routed, shared = self._summed(routed, self.shared(x_TD) if self.shared else None)
        norm = self.norm if self.spec.latent_norm else None
        y = routed.to(x_TD.dtype) if norm is None else self.dense.rms_norm(routed, norm, self.eps)
        if self.spec.latent is not None:
            y = self.up(y)
        return (y,) if shared is None else (y, shared)

    def _summed(self, routed_TZ: Tensor, shared_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Both outputs summed over the shard group, in one message of the model's dtype as every other sum."""
        if self.comm.size == 1:
            return routed_TZ, shared_TD
        routed_TZ = routed_TZ.to(self.dtype)
        if shared_TD is None:
            return self.comm.all_reduce(routed_TZ), None
        packed = torch.cat((routed_TZ, shared_TD), 1)
        routed, shared = self.comm.all_reduce(packed).split(
            (routed_TZ.shape[1], shared_TD.shape[1]), 1
        )
        return routed, shared


def load_experts(
    spec: K3Spec, place: Place, weights: Weights, layer: int, moe_weights: str
) -> ExpertWeights:
    """This rank's experts of `layer`, split by expert id."""
    if moe_weights not in ("dequant", "packed"):
        raise ModelError(f"moe_weights={moe_weights!r}: expected dequant or packed")
    moe = spec.moe
    own = place.shard.of(moe.n_experts)
    count, z = own.stop - own.start, moe.expert_in(spec.hidden_size)
    if spec.mxfp4_experts and moe_weights == "packed":
        return _packed(weights, layer, own)
    make = {"dtype": weights.dtype, "device": weights.device}
    w13 = torch.empty(count, 2 * moe.width, z, **make)
    w2 = torch.empty(count, z, moe.width, **make)
    for i, expert in enumerate(range(own.start, own.stop)):
        w13[i, : moe.width] = _matrix(spec, weights, expert_name(layer, expert, "w1"))
        w13[i, moe.width :] = _matrix(spec, weights, expert_name(layer, expert, "w3"))
        w2[i] = _matrix(spec, weights, expert_name(layer, expert, "w2"))
    return DenseExperts(own.start, w13, w2)


def _matrix(spec: K3Spec, weights: Weights, name: str) -> Tensor:
    if not spec.mxfp4_experts:
        return weights.take(f"{name}.weight")
    packed = weights.take(f"{name}.weight_packed", keep_dtype=True)
    scale = weights.take(f"{name}.weight_scale", keep_dtype=True)
    return unpack(packed, scale, weights.dtype)


def _packed(weights: Weights, layer: int, own: slice) -> PackedExperts:
    def stacked(matrix: str, part: str) -> Tensor:
        names = (expert_name(layer, expert, matrix) for expert in range(own.start, own.stop))
        return torch.stack([weights.take(f"{n}.{part}", keep_dtype=True) for n in names])

    def joint(part: str) -> Tensor:
        return torch.cat((stacked("w1", part), stacked("w3", part)), 1)

    return PackedExperts(
        first=own.start,
        w13_packed=joint("weight_packed"),
        w13_scale=joint("weight_scale"),
        w2_packed=stacked("w2", "weight_packed"),
        w2_scale=stacked("w2", "weight_scale"),
        dtype=weights.dtype,
    )
