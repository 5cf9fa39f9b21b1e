"""Router and experts for the model on GPUs, without a host read: a step may be captured."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.api import BackendError
from k3_kernels.reference.moe import ExpertWeights, PackedExperts
from k3_kernels.triton import moe
from k3_kernels.triton.mxfp4 import LARGEST_SCALE, DealtExperts
from k3_kernels.triton.route import route

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonMoe:
    """`MoeOps`."""

    route = staticmethod(route)

    def __init__(self, n_sms: int) -> None:
        """n_sms: multiprocessors that share out the work."""
        self.n_sms = n_sms

    def require(self, dtype: torch.dtype) -> None:
        """No float64."""
        if dtype not in DTYPES:
            raise BackendError(
                f"backends.moe=triton: activations of {dtype}: expected one of {', '.join(map(str, DTYPES))}; set "
                "backends.moe=reference"
            )

    def gate(self, gate_ED: Tensor) -> Tensor:
        """In bfloat16 where that holds the same numbers: half the bytes and a third of the products."""
        narrow = gate_ED.bfloat16()
        return narrow if torch.equal(narrow.float(), gate_ED) else gate_ED

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """MXFP4 dealt to words. Raises BackendError for scales that no weights have: products would overflow."""
        if isinstance(weights, PackedExperts):
            largest = max(int(s.max()) for s in (weights.w13_scale, weights.w2_scale))
            if largest > LARGEST_SCALE:
                raise BackendError(
                    f"an MXFP4 scale of 2^{largest - 127}: backends.moe=triton multiplies with at most "
                    f"2^{LARGEST_SCALE - 127}; set backends.moe_weights=dequant or backends.moe=reference"
                )
            return DealtExperts.of(weights)
        return weights

    def experts(
        self,
        z_TZ: Tensor,
        ids_Tk: Tensor,
        weight_Tk: Tensor,
        weights: ExpertWeights,
        beta: float,
        linear_beta: float | None,
    ) -> Tensor:
        """`reference.moe.experts`, float32."""
        return moe.experts(z_TZ, ids_Tk, weight_Tk, weights, beta, linear_beta, self.n_sms)
