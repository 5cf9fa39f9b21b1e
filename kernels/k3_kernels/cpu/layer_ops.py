"""Whole layers of verify groups as one call each: `k3_kernels.layers` by the native library.

A block is made where all its projections are packed; its constants are gathered in a structure once, and every call
passes that structure's address and what changes from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, addressof, byref
from operator import is_not

from torch import Tensor

from k3_kernels.cpu import blocks
from k3_kernels.cpu.calls import as_rows, pair
from k3_kernels.cpu.dense import NativeProjection, Packed, most_tokens
from k3_kernels.cpu.plan import NativePlan
from k3_kernels.layers import KdaLayer, MlaLayer, MoeLayer
from k3_kernels.reference.group import GroupCache


def packed(projection: Callable[[Tensor], Tensor] | None) -> Packed | None:
    """The matrix of a projection of ours."""
    return projection.packed if isinstance(projection, NativeProjection) else None


def are_packed(*projections: Callable[[Tensor], Tensor] | None) -> bool:
    """Whether all there are were made by this backend."""
    return all(p is None or isinstance(p, NativeProjection) for p in projections)


class NativeBlock:
    """A structure, the layer whose tensors it points to, and the function that reads it."""

    def __init__(self, name: str, structure: Structure, layer: object, like: Tensor) -> None:
        self.most_tokens = most_tokens()
        self._call = pair(name)[like.dtype]
        self._layer, self._structure = layer, structure
        self._address = addressof(structure)


class NativeKdaBlock(NativeBlock):
    """`layers.KdaBlock`."""

    def __init__(self, layer: KdaLayer) -> None:
        """Raises LibraryError."""
        rule = layer.rule
        heads, _, dim, conv = rule.conv_HSDw.shape
        matrices = (packed(p) for p in (layer.entry, layer.gate_up, layer.decay_up, layer.out))
        structure = blocks.KdaBlock(
            *(blocks.Matrix.of(matrix) for matrix in matrices),
            *(rule.conv_HSDw.data_ptr(), rule.bias_HD.data_ptr(), rule.decay_H.data_ptr()),
            *(layer.norm.data_ptr(), heads, dim, conv, layer.widths[1]),
            *(rule.lower_bound or 0.0, rule.eps, layer.eps),
        )
        super().__init__("k3_kda_block", structure, layer, rule.bias_HD)
        self._seen: tuple[Tensor | None, ...] = ()  # pools of the last call
        self._pools = blocks.KdaPools()

    def __call__(
        self, x_TD: Tensor, group: int, cache: GroupCache, slots_B: Tensor, read_column_B: Tensor
    ) -> Tensor:
        """[T, D]."""
        x, stride = as_rows(x_TD)
        y = x.new_empty(x.shape)
        self._look_at(cache)
        self._call(
            *(self._address, x.data_ptr(), stride, slots_B.data_ptr(), read_column_B.data_ptr()),
            *(byref(self._pools), x.shape[0] // group, group, y.data_ptr()),
        )
        return y

    def _look_at(self, cache: GroupCache) -> None:
        pools = (cache.states, cache.windows, cache.tails, cache.records)
        if not self._seen or any(map(is_not, self._seen, pools)):
            self._pools, self._seen = blocks.KdaPools.of(cache), pools


class NativeMlaBlock(NativeBlock):
    """`layers.MlaBlock`."""

    def __init__(self, layer: MlaLayer) -> None:
        """Raises LibraryError."""
        up, query_norm = layer.kv_up_HDC, layer.query_norm
        heads, both, rank = up.shape
        matrices = (packed(p) for p in (layer.entry, layer.query_up, layer.out))
        structure = blocks.MlaBlock(
            *(blocks.Matrix.of(matrix) for matrix in matrices),
            layer.latent_norm.data_ptr(),
            None if query_norm is None else query_norm.data_ptr(),
            *(up.data_ptr(), up[:, layer.nope :].data_ptr()),
            *(heads, layer.nope, layer.rope, rank, both - layer.nope, layer.widths[1]),
            *(len(layer.widths) > 2, up.stride(0), layer.scale, layer.eps),
        )
        super().__init__("k3_mla_block", structure, layer, up)

    def __call__(self, x_TD: Tensor, cache_PTK: Tensor, slot_T: Tensor, plan: NativePlan) -> Tensor:
        """[T, D]."""
        x, stride = as_rows(x_TD)
        y, cache = x.new_empty(x.shape), cache_PTK
        assert cache.stride(2) == 1, f"cache: strides {cache.stride()}"
        assert cache.dtype == x.dtype, f"cache {cache.dtype}, inputs {x.dtype}"
        self._call(
            *(self._address, x.data_ptr(), stride),
            *(cache.data_ptr(), cache.stride(0), cache.stride(1), slot_T.data_ptr()),
            *(plan.table.data_ptr(), plan.table.stride(0), plan.bound.data_ptr()),
            *(cache.shape[1], plan.table.shape[0], plan.group, y.data_ptr()),
        )
        return y


class NativeMoeBlock(NativeBlock):
    """`layers.MoeBlock`."""

    def __init__(self, layer: MoeLayer, w13: Packed, w2: Packed) -> None:
        """Raises LibraryError."""
        rule, norm = layer.rule, layer.norm
        experts, width = layer.gate_ED.shape
        matrices = (packed(layer.down), w13, w2, packed(layer.up))
        shared = (packed(layer.shared_gate_up), packed(layer.shared_down))
        structure = blocks.MoeBlock(
            *(layer.gate_ED.data_ptr(), layer.bias_E.data_ptr()),
            None if norm is None else norm.data_ptr(),
            *(blocks.Matrix.of(matrix) for matrix in (*matrices, *shared)),
            *(layer.experts.first, experts, width, rule.top_k, rule.n_groups, rule.top_groups),
            *(rule.activation == "softmax", rule.renormalize, rule.scaling),
            *(layer.beta, layer.linear_beta or 0.0, layer.eps),
        )
        super().__init__("k3_moe_block", structure, layer, layer.gate_ED)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, D]."""
        x, stride = as_rows(x_TD)
        y = x.new_empty(x.shape)
        self._call(self._address, x.data_ptr(), stride, x.shape[0], y.data_ptr())
        return y
