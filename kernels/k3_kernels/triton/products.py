"""Matrix products by torch whose weight other kernels may read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from k3_kernels.api import Projection

# Bytes. cuBLAS's fast kernels want every row of inputs and outputs to start at a multiple.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Product:
    """x [.., I] -> x weight^T [.., O]. `filled_PI`: the weight and rows of zeros, so that rows of outputs are aligned."""

    weight_OI: Tensor
    filled_PI: Tensor

    @classmethod
    def of(cls, weight_OI: Tensor) -> Product:
        """Copies a weight only if rows are missing."""
        n_outputs = len(weight_OI)
        step = ALIGNMENT // weight_OI.element_size()
        missing = -n_outputs % step
        if not missing or n_outputs < step:
            return cls(weight_OI, weight_OI)
        filled = torch.cat((weight_OI, weight_OI.new_zeros(missing, weight_OI.shape[1])))
        return cls(filled[:n_outputs], filled)

    def __call__(self, x: Tensor) -> Tensor:
        """In the weight's dtype; rows of outputs may be further apart than they are long."""
        return linear(x, self.filled_PI)[..., : len(self.weight_OI)]


def weight_of(projection: Projection) -> Tensor:
    """The weight [O, I] of a `Product`."""
    assert isinstance(projection, Product), f"{projection}: not made by the same operations"
    return projection.weight_OI
