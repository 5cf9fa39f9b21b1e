"""Norms and activations in Triton's interpreter equal the reference, on views of wider buffers with NaN around them."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.reference import norm as reference
from k3_kernels.triton import norm
from torch import Tensor

from tests.compare import assert_close

EPS = 1e-5
DTYPES = [
    pytest.param(torch.float32, 3e-6, id="float32"),
    pytest.param(torch.float16, 4e-3, id="float16"),
]


def view(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers in the middle of a NaN-filled buffer."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.full((shape[0], *shape[1:-1], shape[-1] + 5), float("nan"), dtype=dtype)
    inside = buffer[..., 2:-3]
    inside.copy_(2 * torch.randn(*shape, generator=generator))
    return inside


@pytest.mark.parametrize("dtype, atol", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 100), (2, 3, 8), (2, 3, 5, 8), (1, 5000), (0, 7)], ids=str
)
def test_rms_norm_equals_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, atol: float
) -> None:
    x = view(*shape, dtype=dtype, seed=1)
    weight = view(1, shape[-1], dtype=dtype, seed=2)[0]
    got = norm.rms_norm(x, weight, EPS)
    assert got.dtype == dtype
    assert_close(got, reference.rms_norm(x, weight, EPS), 2 * atol, "norm")


def test_wide_rows_are_rounded_before_they_are_normalised() -> None:
    x, weight = view(3, 100, dtype=torch.float32, seed=8), view(1, 100, dtype=torch.float16, seed=9)
    got, expected = norm.rms_norm(x, weight[0], EPS), reference.rms_norm(x, weight[0], EPS)
    assert got.dtype == expected.dtype == torch.float16
    assert_close(got, expected, 8e-3, "norm")
    assert_close(got, reference.rms_norm(x.half(), weight[0], EPS), 8e-3, "norm of rounded rows")


@pytest.mark.parametrize("dtype, atol", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 16), (7, 3, 20), (0, 2, 8)], ids=str)
def test_gated_rms_norm_of_wide_rows_equals_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, atol: float
) -> None:
    x, gate = view(*shape, dtype=torch.float32, seed=3), view(*shape, dtype=dtype, seed=4)
    weight = view(1, shape[-1], dtype=torch.float32, seed=5)[0]
    got = norm.gated_rms_norm(x, gate, weight, EPS)
    assert got.dtype == dtype
    assert_close(got, reference.gated_rms_norm(x, gate, weight, EPS), 2 * atol, "gated norm")


@pytest.mark.parametrize("dtype, atol", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5001), (0, 4)], ids=str)
def test_gates_equal_the_reference(shape: tuple[int, int], dtype: torch.dtype, atol: float) -> None:
    x, gate = view(*shape, dtype=dtype, seed=6), view(*shape, dtype=dtype, seed=7)
    assert_close(norm.gate(x, gate), x * torch.sigmoid(gate), atol, "gated")


@pytest.mark.parametrize("dtype, atol", DTYPES)
@pytest.mark.parametrize("linear_beta", [None, 25.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 2300), (0, 4)])
def test_situ_equals_the_reference(
    rows: int, width: int, linear_beta: float | None, dtype: torch.dtype, atol: float
) -> None:
    x = view(rows, 2 * width, dtype=dtype, seed=8)
    gate, up = x.chunk(2, -1)
    expected = reference.situ(gate, up, 4.0, linear_beta)
    assert_close(norm.situ(x, 4.0, linear_beta), expected, 2 * atol, "situ")


def test_a_small_input_of_situ_keeps_its_digits() -> None:
    """Relative to the result: cancellation would show here and nowhere else."""
    x = torch.logspace(-15, 1, 63).repeat(2).view(1, -1)
    gate, up = x.double().chunk(2, -1)
    expected = reference.situ(gate, up, 4.0, 25.0)
    relative = norm.situ(x, 4.0, 25.0) / expected - 1
    assert_close(relative, torch.zeros(1, 63), 3e-6, "relative difference")
