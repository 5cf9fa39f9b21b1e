"""Prefill chunks on the card: attention and delta rule at the widths of Kimi-K3 and at odd ones."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from k3_kernels.reference import kda as kda_reference
from k3_kernels.reference import mla as mla_reference
from k3_kernels.triton import kda_chunk, mla_prefill
from torch import Tensor

from tests.compare import assert_close


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize(
    "dtype, atol", [(torch.bfloat16, 3e-2), (torch.float32, 2e-5)], ids=["bf16", "fp32"]
)
@pytest.mark.parametrize(
    "lengths, starts, heads, dims, page",
    [
        ((1, 300, 77), (500, 0, 130), 5, (512, 128, 64, 128), 64),
        ((200,), (3,), 3, (40, 24, 8, 20), 16),
    ],
    ids=["Kimi-K3", "small"],
)
def test_chunks_of_several_requests_equal_the_reference(
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    heads: int,
    dims: tuple[int, int, int, int],
    page: int,
    dtype: torch.dtype,
    atol: float,
) -> None:
    torch.manual_seed(heads)
    rank, nope, shared, value = dims
    cu_lens = tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))
    width = max(-(-(a + b) // page) for a, b in zip(lengths, starts, strict=True))
    table = torch.randperm(len(lengths) * width, device="cuda").view(-1, width).to(torch.int32)
    cache = draw(len(lengths) * width, page, rank + shared, dtype=dtype)
    q = draw(cu_lens[-1], heads, nope + shared, dtype=dtype)
    up = (draw(heads, nope + value, rank) * rank**-0.5).to(dtype)
    scale = (nope + shared) ** -0.5
    got = mla_prefill.prefill(q, cache, table, cu_lens, starts, up, scale)
    expected = mla_reference.prefill(
        q.double(), cache.double(), table, cu_lens, starts, up.double(), scale
    )
    assert_close(got, expected, atol, "attention")


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "any gate"])
@pytest.mark.parametrize("tokens, heads, dim", [(1, 2, 128), (333, 5, 128), (70, 3, 32)])
def test_the_delta_rule_of_a_chunk_equals_the_reference(
    tokens: int, heads: int, dim: int, bound: float | None
) -> None:
    torch.manual_seed(tokens)
    joint = draw(tokens, heads, 3, dim)
    joint[:, :, :2] = kda_reference.l2_normalize(joint[:, :, :2], 1e-6)
    g = -5 * torch.rand(tokens, heads, dim, device="cuda").sqrt()
    beta = torch.rand(tokens, heads, device="cuda")
    q, k, v = joint.unbind(2)
    first = draw(heads, dim, dim)
    o, state = kda_chunk.delta(q, k, v, g, beta, first, lower_bound=bound)
    expected, expected_state = kda_reference.chunk(
        q.double(), k.double(), v.double(), g.double(), beta.double(), first.double()
    )
    assert_close(o, expected, 5e-5, "output")
    assert_close(state, expected_state, 5e-5, "state")
