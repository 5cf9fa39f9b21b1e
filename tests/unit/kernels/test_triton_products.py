"""Rows of a product's outputs start at aligned addresses, whatever their number; cuBLAS is slow otherwise."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.triton.products import ALIGNMENT, Product, weight_of
from torch.nn.functional import linear


@pytest.mark.parametrize("n_outputs", [1, 3, 8, 12, 76, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_outputs_are_those_of_the_weight_alone(n_outputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n_outputs)
    weight = torch.randn(n_outputs, 32, generator=generator).to(dtype)
    x = torch.randn(5, 32, generator=generator).to(dtype)
    product = Product.of(weight)
    got = product(x)
    assert got.shape == (5, n_outputs)
    torch.testing.assert_close(got, linear(x, weight))
    assert torch.equal(weight_of(product), weight)
    if n_outputs * dtype.itemsize >= ALIGNMENT:
        assert got.stride(0) * dtype.itemsize % ALIGNMENT == 0
