"""Expert choice and routed experts by the native library equal the reference, also on ranks of a few experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from k3_kernels.cpu import library
from k3_kernels.cpu.moe_ops import NativeExperts, NativeMoe
from k3_kernels.reference import moe
from k3_kernels.reference.moe import DenseExperts, Routing

from tests.compare import assert_close

pytestmark = pytest.mark.skipif(not library.is_built(), reason="no C++ compiler at install")
DTYPES = [(torch.float64, 1e-12), (torch.float32, 2e-5)]
RULE = Routing(top_k=3, activation="sigmoid", renormalize=True, scaling=2.5)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize(
    "rule, n_experts",
    [
        (RULE, 21),
        (replace(RULE, activation="softmax", renormalize=False), 5),
        (replace(RULE, n_groups=4, top_groups=2), 12),
        (replace(RULE, top_k=1, n_groups=5, top_groups=1), 5),
    ],
)
def test_choice_and_weights_equal_the_reference(
    rule: Routing, n_experts: int, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(n_experts)
    x = torch.randn(7, 15, generator=generator, dtype=dtype)[:, 2:]
    gate = torch.randn(n_experts, 13, generator=generator, dtype=dtype)
    bias = torch.randn(n_experts, generator=generator, dtype=dtype)
    ids, weight = NativeMoe().route(x, gate, bias, rule)
    expected_ids, expected = moe.route(x, gate, bias, rule)
    order, expected_order = ids.argsort(-1), expected_ids.argsort(-1)
    assert torch.equal(ids.gather(-1, order), expected_ids.gather(-1, expected_order))
    expected = expected.gather(-1, expected_order)
    assert_close(weight.gather(-1, order), expected, tolerance, "weights")


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("n_tokens", [1, 2, 9, 70])
@pytest.mark.parametrize("first, is_narrow", [(0, False), (2, True)])
def test_routed_experts_equal_the_reference(
    n_tokens: int, first: int, is_narrow: bool, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(n_tokens)
    n_experts, inner, width = 5, 9, 22
    w13 = torch.randn(n_experts, 2 * inner, width, generator=generator, dtype=dtype)
    w2 = torch.randn(n_experts, width, inner, generator=generator, dtype=dtype)
    if is_narrow:
        w13, w2 = w13.bfloat16().to(dtype), w2.bfloat16().to(dtype)
    weights = DenseExperts(first, w13, w2)
    z = torch.randn(n_tokens, width + 1, generator=generator, dtype=dtype)[:, 1:]
    score = torch.rand(n_tokens, 9, generator=generator, dtype=dtype)  # some held elsewhere
    weight, ids = score.topk(3, -1)
    ops = NativeMoe()
    prepared = ops.prepare(weights)
    assert isinstance(prepared, NativeExperts)
    assert prepared.w13_packed.is_narrow == (is_narrow and dtype == torch.float32)
    for linear_beta in (25.0, None):
        got = ops.experts(z, ids, weight, prepared, 4.0, linear_beta)
        expected = moe.experts(z, ids, weight, weights, 4.0, linear_beta)
        assert_close(got / 100, expected / 100, tolerance, "sum of experts")
