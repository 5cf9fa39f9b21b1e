"""The operations of a step on CPUs, by the native library: same signatures and rules as `k3_kernels.reference`.

The library computes in float32 and float64. Tensors of another dtype (a bfloat16 model on a CPU) go to the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.cpu.calls import DTYPES, pair, rows
from k3_kernels.cpu.chunk_ops import NativeChunks
from k3_kernels.reference import attnres
from k3_kernels.reference.group import verify

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

    group = staticmethod(verify)

    def require(self, head_dim: int, conv_width: int, dtype: torch.dtype) -> None:
        """Everything can be computed."""
