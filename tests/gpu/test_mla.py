# ruff: noqa: TID251
"""Latent attention on a GPU at K3's widths in bfloat16: ours and the libraries against float64, captured steps.

Tolerance: p and o are rounded to 8 bits, so an output of size 1 is off by up to about 2 %; norms by under 1 %.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from k3_kernels.backends.flashinfer import FlashInferAttention
from k3_kernels.backends.flashmla import FlashMlaAttention
from k3_kernels.triton.combine import merge
from k3_kernels.triton.mla_ops import TritonAttention
from torch import Tensor

from tests.latent_steps import SHAPES, Case, step

LATENT, SHARED, SCALE = 512, 64, 192**-0.5


def n_sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def hopper() -> TritonAttention:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    return TritonAttention(n_sms(), hopper=True)


def flashmla() -> TritonAttention:
    pytest.importorskip("flash_mla", exc_type=ImportError)
    return FlashMlaAttention(n_sms())


def flashinfer() -> TritonAttention:
    pytest.importorskip("flashinfer", exc_type=ImportError)
    return FlashInferAttention(n_sms(), torch.device("cuda"))


BACKENDS = {
    "triton": lambda: TritonAttention(n_sms()),
    "hopper": hopper,
    "flashmla": flashmla,
    "flashinfer": flashinfer,
}


def check(case: Case, ops: TritonAttention) -> None:
    o, lse = case.triton(ops, SCALE, LATENT)
    expected_o, expected_lse = case.reference(SCALE, LATENT)
    empty = expected_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty)
    assert not o[empty].any(), "a query without keys gives 0"
    error = float((o.double() - expected_o).norm() / expected_o.norm().clamp(min=1e-30))
    assert error < 0.01, f"relative error {error:.4f}"
    worst = float((lse.double() - expected_lse)[~empty].abs().max()) if not empty.all() else 0.0
    assert worst < 0.01, f"lse off by {worst:.4f}"


@pytest.mark.parametrize("heads", [12, 96])
@pytest.mark.parametrize("bounds", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_bounds_are_kept(
    bounds: list[list[int]], heads: int, make: Callable[[], TritonAttention]
) -> None:
    check(step(bounds, heads, LATENT, SHARED, dtype=torch.bfloat16), make())


@pytest.mark.parametrize("heads", [12, 96])
@pytest.mark.parametrize("name", ["triton", "hopper", "flashmla"])
def test_a_captured_step_follows_bounds_that_change(name: str, heads: int) -> None:
    case = step([[700, 701], [64, 65]], heads, LATENT, SHARED, dtype=torch.bfloat16)
    ops = BACKENDS[name]()
    case.triton(ops, SCALE, LATENT)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = case.triton(ops, SCALE, LATENT)
    for bounds in ([1, 2, 0, 0], [333, 334, 65, 65]):
        case.bound_T.copy_(torch.tensor(bounds))
        graph.replay()
        expected_o, expected_lse = case.reference(SCALE, LATENT)
        assert torch.allclose(o.double(), expected_o, atol=0.03)
        assert torch.allclose(lse.double(), expected_lse, atol=0.01)


def test_a_pool_beyond_32_bits_is_addressed() -> None:
    pages = (1 << 32) // (64 * 576) + 5
    pool = torch.empty(pages, 64, 576, dtype=torch.bfloat16, device="cuda")
    last = torch.randn(64, 576, device="cuda").bfloat16()
    pool[-1] = last
    ops = TritonAttention(n_sms())
    table = torch.tensor([[pages - 1]], dtype=torch.int32, device="cuda")
    q = torch.randn(1, 12, 576, device="cuda").bfloat16()
    ops.write(pool, torch.tensor([pages * 64 - 1], device="cuda"), last[:1])
    assert torch.equal(pool[-1, 63], last[0])
    bound = torch.tensor([64], dtype=torch.int32, device="cuda")
    case = Case(q, pool, table, bound, 1)
    small = Case(q, pool[-1:], table * 0, bound, 1)
    o, _ = case.triton(ops, SCALE, LATENT)
    expected, _ = small.reference(SCALE, LATENT)
    assert torch.allclose(o.double(), expected, atol=0.03)


def test_a_full_merge_of_eight_ranks() -> None:
    torch.manual_seed(3)
    o = torch.randn(8, 512, 12, LATENT, device="cuda").bfloat16()
    lse = torch.randn(8, 512, 12, device="cuda")
    lse[3, ::2] = float("-inf")
    o[3, ::2] = float("nan")
    weight = torch.softmax(lse.double(), 0).unsqueeze(-1)
    expected: Tensor = torch.where(weight == 0, 0.0, o.double() * weight).sum(0)
    got, _ = merge(o, lse)
    assert float((got.double() - expected).norm() / expected.norm()) < 0.01
