"""The operations of a step on CPUs, by the native library: same signatures and rules as `k3_kernels.reference`.

The library computes in float32 and float64. Tensors of another dtype (a bfloat16 model on a CPU) go to the reference.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from k3_kernels.cpu.blocks import KdaPools
from k3_kernels.cpu.calls import DTYPES, pair, rows
from k3_kernels.cpu.chunk_ops import NativeChunks
from k3_kernels.cpu.layer_ops import NativeKdaBlock, are_packed
from k3_kernels.layers import KdaLayer
from k3_kernels.reference import attnres
from k3_kernels.reference.group import GroupCache, GroupRule, verify

MOST_CANDIDATES = 64  # of a mixing site, in src/mix.cpp


class NativeMix:
    """`reference.attnres.mix`."""

    def __init__(self) -> None:
        """Raises LibraryError."""
        self._mix = pair("k3_mix")

    def __call__(self, candidates_TJH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """Softmax mixture of the candidates."""
        x = candidates_TJH
        if x.dtype not in DTYPES or x.shape[1] > MOST_CANDIDATES:
            return attnres.mix(x, weight_H, eps)
        x = rows(x)
        n_tokens, n_candidates, width = x.shape
        y = x.new_empty(n_tokens, width)
        self._mix[x.dtype](
            *(x.data_ptr(), x.stride(0), x.stride(1), weight_H.data_ptr(), y.data_ptr()),
            *(n_tokens, n_candidates, width, eps),
        )
        return y


class NativeKda(NativeChunks):
    """`reference.group`."""

    def __init__(self) -> None:
        """Raises LibraryError."""
        super().__init__()
        self._group = pair("k3_kda_group")

    def group(
        self,
        u_BGHSD: Tensor,
        raw_BGHD: Tensor,
        beta_BGH: Tensor,
        rule: GroupRule,
        cache: GroupCache,
        slots_B: Tensor,
        read_column_B: Tensor,
    ) -> Tensor:
        """Convolution, normalisation, gate and recurrence of every row, head by head."""
        u = u_BGHSD
        if u.dtype not in DTYPES:
            return verify(u, raw_BGHD, beta_BGH, rule, cache, slots_B, read_column_B)
        n_rows, group, heads, _, dim = u.shape
        assert u.stride()[2:] == (3 * dim, dim, 1), f"inputs: strides {u.stride()}"
        assert raw_BGHD.stride()[2:] == (dim, 1), f"raw gate: strides {raw_BGHD.stride()}"
        assert cache.states.dtype == u.dtype, f"states {cache.states.dtype}, inputs {u.dtype}"
        o = u.new_empty(n_rows, group, heads, dim)
        pools = byref(KdaPools.of(cache))
        self._group[u.dtype](
            *(u.data_ptr(), u.stride(0) // group),
            *(raw_BGHD.data_ptr(), raw_BGHD.stride(0) // group),
            *(beta_BGH.data_ptr(), beta_BGH.stride(0) // group, rule.conv_HSDw.data_ptr()),
            *(rule.bias_HD.data_ptr(), rule.decay_H.data_ptr(), rule.lower_bound or 0.0, rule.eps),
            *(slots_B.data_ptr(), read_column_B.data_ptr(), pools),
            *(o.data_ptr(), n_rows, group, heads, dim, rule.conv_HSDw.shape[-1]),
        )
        return o

    def require(self, head_dim: int, conv_width: int, dtype: torch.dtype) -> None:
        """Everything can be computed."""

    def block(self, layer: KdaLayer) -> NativeKdaBlock | None:
        """One call for a whole layer, where its projections are packed."""
        if not are_packed(layer.entry, layer.gate_up, layer.decay_up, layer.out):
            return None
        return NativeKdaBlock(layer)
