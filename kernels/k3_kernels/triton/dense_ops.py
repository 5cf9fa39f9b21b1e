"""What surrounds the other kernels on GPUs: torch's matrix products, norms and activations in one launch each."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from k3_kernels.api import BackendError, Projection
from k3_kernels.triton import norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonDense:
    """`DenseOps`."""

    rms_norm = staticmethod(norm.rms_norm)
    gated_rms_norm = staticmethod(norm.gated_rms_norm)
    gate = staticmethod(norm.gate)
    situ = staticmethod(norm.situ)

    def projection(self, weight_OI: Tensor) -> Projection:
        """Torch's own product. Raises BackendError for float64, which norms here do not compute in."""
        if weight_OI.dtype not in DTYPES:
            raise BackendError(
                f"backends.kda=triton: weights of {weight_OI.dtype}: expected one of {', '.join(map(str, DTYPES))}; "
                "set backends.kda=reference"
            )
        return partial(linear, weight=weight_OI)
