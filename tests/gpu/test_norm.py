"""Norms and activations on the card, at the widths of Kimi-K3, on views of joint projections."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from k3_kernels.reference import norm as reference
from k3_kernels.triton import norm
from torch import Tensor

from tests.compare import assert_close

EPS = 1e-5


def columns(tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Some columns of a NaN-filled matrix."""
    buffer = torch.full((tokens, width + 24), float("nan"), device="cuda", dtype=dtype)
    buffer[:, 8:-16] = torch.randn(tokens, width, device="cuda")
    return buffer[:, 8:-16]


@pytest.mark.parametrize("tokens, width", [(256, 7168), (256, 3584), (33, 512), (5, 70)])
def test_rms_norm_equals_the_reference(tokens: int, width: int) -> None:
    """Rounded twice, as the reference does: two bits of numbers below 32."""
    torch.manual_seed(width)
    x, weight = columns(tokens, width), torch.randn(width, device="cuda").bfloat16()
    assert_close(norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), 0.13, "norm")


@pytest.mark.parametrize("tokens, heads, dim", [(256, 96, 128), (3, 5, 48)])
def test_gated_rms_norm_equals_the_reference(tokens: int, heads: int, dim: int) -> None:
    torch.manual_seed(heads)
    x = torch.randn(tokens, heads, dim, device="cuda")
    gate = columns(tokens, heads * dim).unflatten(1, (heads, dim))
    weight = torch.randn(dim, device="cuda")
    expected = reference.gated_rms_norm(x, gate, weight, EPS)
    assert_close(norm.gated_rms_norm(x, gate, weight, EPS), expected, 0.07, "gated norm")


@pytest.mark.parametrize("tokens, width", [(256, 12288), (3, 100)])
def test_activations_equal_the_reference(tokens: int, width: int) -> None:
    torch.manual_seed(width)
    x, gate = columns(tokens, width), columns(tokens, width)
    assert_close(norm.gate(x, gate), x * torch.sigmoid(gate), 0.04, "gated")
    joint = columns(tokens, 2 * width)
    first, second = joint.chunk(2, -1)
    expected = reference.situ(first, second, 4.0, 25.0)
    assert_close(norm.situ(joint, 4.0, 25.0), expected, 0.07, "situ")
