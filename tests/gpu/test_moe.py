"""Router and experts on the card: widths of Kimi-K3 with few experts, odd ones, packed weights, and under capture."""

# ruff: noqa: TID251  (captures by hand)

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from k3_kernels.reference import moe as reference
from k3_kernels.reference.moe import DenseExperts, ExpertWeights, PackedExperts, Routing
from k3_kernels.triton import moe, route
from k3_kernels.triton.moe_ops import TritonMoe
from torch import Tensor

from tests.compare import assert_close

N_SMS = 132


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def some_experts(
    first: int, count: int, z: int, f: int, dtype: torch.dtype, packed: bool
) -> ExpertWeights:
    if not packed:
        w13, w2 = draw(count, 2 * f, z) / z**0.5, draw(count, z, f) / f**0.5
        return DenseExperts(first, w13.to(dtype), w2.to(dtype))

    def matrix(rows: int, width: int) -> tuple[Tensor, Tensor]:
        make = {"dtype": torch.uint8, "device": "cuda"}
        scale = torch.randint(118, 122, (count, rows, width // 32), **make)
        return torch.randint(0, 256, (count, rows, width // 2), **make), scale

    return PackedExperts(first, *matrix(2 * f, z), *matrix(z, f), dtype)


def exact(weights: ExpertWeights) -> ExpertWeights:
    match weights:
        case DenseExperts(first, w13, w2):
            return DenseExperts(first, w13.double(), w2.double())
        case PackedExperts(first, p13, s13, p2, s2, _):
            return PackedExperts(first, p13, s13, p2, s2, torch.float64)
    raise AssertionError(type(weights))


def relative_rms(got: Tensor, expected: Tensor) -> float:
    assert bool(got.isfinite().all())
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "tokens, n_experts, width, rule",
    [
        (256, 896, 7168, Routing(16, "sigmoid", True, 1.0)),
        (1, 896, 7168, Routing(16, "sigmoid", True, 1.0)),
        (37, 48, 300, Routing(3, "sigmoid", True, 2.5, 6, 2)),
        (5, 15, 70, Routing(4, "softmax", False, 1.0)),
    ],
)
def test_the_router_chooses_and_weighs_as_the_reference(
    tokens: int, n_experts: int, width: int, rule: Routing
) -> None:
    """Scores closer than float32 tells apart may change places: each choice is as good as the reference's."""
    torch.manual_seed(n_experts)
    x, gate = draw(tokens, width, dtype=torch.bfloat16), draw(n_experts, width) / width**0.5
    bias = 0.1 * draw(n_experts)
    ids, weight = route.route(x, gate, bias, rule)
    expected_ids, expected = reference.route(x.double(), gate.double(), bias.double(), rule)
    logits = x.double() @ gate.double().t()
    score = torch.sigmoid(logits) if rule.activation == "sigmoid" else torch.softmax(logits, -1)
    biased = score + bias
    got, best = (biased.gather(1, i).sort(-1).values for i in (ids, expected_ids))
    assert_close(got, best, 2e-6, "biased scores of the chosen")
    assert_close(weight.sort(-1).values, expected.sort(-1).values, 5e-6, "weights")


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "dtype, limit", [(torch.bfloat16, 6e-3), (torch.float32, 2e-5)], ids=["bf16", "fp32"]
)
@pytest.mark.parametrize(
    "tokens, everybody, first, count, top_k, z, f",
    [(256, 32, 6, 5, 8, 3584, 3072), (700, 9, 1, 4, 3, 320, 96), (1, 4, 0, 4, 2, 64, 32)],
)
def test_experts_equal_the_reference(
    tokens: int,
    everybody: int,
    first: int,
    count: int,
    top_k: int,
    z: int,
    f: int,
    dtype: torch.dtype,
    limit: float,
    packed: bool,
) -> None:
    torch.manual_seed(tokens)
    weights = some_experts(first, count, z, f, dtype, packed)
    ids = torch.rand(tokens, everybody, device="cuda").argsort(-1)[:, :top_k].contiguous()
    weight = torch.rand(tokens, top_k, device="cuda")
    x = draw(tokens, z, dtype=dtype)
    got = moe.experts(x, ids, weight, TritonMoe(N_SMS).prepare(weights), 4.0, 25.0, N_SMS)
    want = reference.experts(x.double(), ids, weight.double(), exact(weights), 4.0, 25.0)
    assert relative_rms(got, want) < limit


def test_a_captured_step_follows_the_choices_of_its_tokens() -> None:
    """Recorded with one choice of experts, replayed with others: nothing was read on the host."""
    torch.manual_seed(5)
    weights = some_experts(2, 6, 512, 256, torch.bfloat16, True)
    prepared = TritonMoe(N_SMS).prepare(weights)
    gate, bias = draw(12, 700), draw(12)
    x, z = draw(40, 700, dtype=torch.bfloat16), draw(40, 512, dtype=torch.bfloat16)
    rule = Routing(4, "sigmoid", True, 1.0)

    def step() -> Tensor:
        ids, weight = route.route(x, gate, bias, rule)
        return moe.experts(z, ids, weight, prepared, 4.0, 25.0, N_SMS)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    for lean in (1.0, -2.0, 0.0):
        x.copy_(draw(40, 700))
        bias.copy_(lean * torch.arange(12, device="cuda"))
        graph.replay()
        assert torch.equal(o, step())
