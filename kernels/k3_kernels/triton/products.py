"""Matrix products by torch whose weight other kernels may read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear

from k3_kernels.api import Projection


@dataclass(frozen=True, slots=True)
class Product:
    """x [.., I] -> x weight^T [.., O]."""

    weight_OI: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """In the weight's dtype."""
        return linear(x, self.weight_OI)


def weight_of(projection: Projection) -> Tensor:
    """The weight [O, I] of a `Product`."""
    assert isinstance(projection, Product), f"{projection}: not made by the same operations"
    return projection.weight_OI
