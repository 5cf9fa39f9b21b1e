"""Router and routed experts in Triton's interpreter equal the reference, on odd sizes with NaN in every new buffer."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.reference import moe as reference
from k3_kernels.reference.moe import DenseExperts, ExpertWeights, PackedExperts, Routing
from k3_kernels.triton import moe, route
from k3_kernels.triton.moe_ops import TritonMoe
from k3_kernels.triton.mxfp4 import DealtExperts
from torch import Tensor

from tests.compare import assert_close
from tests.mxfp4 import pack

RULES = [
    pytest.param(1, 7, 2100, Routing(1, "sigmoid", True, 1.0), id="one of seven"),
    pytest.param(5, 70, 130, Routing(6, "sigmoid", True, 2.5), id="more experts than a tile"),
    pytest.param(33, 24, 11, Routing(3, "sigmoid", True, 1.0, 4, 2), id="two of four groups"),
    pytest.param(3, 15, 65, Routing(2, "softmax", False, 1.5, 5, 3), id="softmax, groups of three"),
    pytest.param(2, 6, 12, Routing(2, "sigmoid", True, 1.0, 6, 3), id="groups of one"),
    pytest.param(0, 8, 4, Routing(2, "sigmoid", True, 1.0), id="no tokens"),
]


@pytest.fixture(autouse=True)
def nan_in_new_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        value = float("nan") if dtype.is_floating_point else -(1 << 30)
        return torch.full(shape, value, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("tokens, n_experts, width, rule", RULES)
def test_the_router_chooses_and_weighs_as_the_reference(
    tokens: int, n_experts: int, width: int, rule: Routing
) -> None:
    generator = torch.Generator().manual_seed(width + n_experts)
    x = torch.randn(tokens, width + 3, generator=generator)[:, :width]
    gate = torch.randn(n_experts, width, generator=generator) / width**0.5
    bias = 0.3 * torch.randn(n_experts, generator=generator)
    ids, weight = route.route(x, gate, bias, rule)
    expected_ids, expected = reference.route(x.double(), gate.double(), bias.double(), rule)
    assert ids.dtype == torch.int64
    order, expected_order = ids.argsort(-1), expected_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), expected_ids.gather(1, expected_order))
    assert_close(weight.gather(1, order), expected.gather(1, expected_order), 2e-6, "weights")


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    gate, bias = torch.zeros(9, 4), torch.zeros(9)
    ids, weight = route.route(torch.ones(2, 4), gate, bias, Routing(3, "sigmoid", True, 1.0))
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert_close(weight, torch.full((2, 3), 1 / 3), 1e-7, "weights")


def some_experts(
    first: int, count: int, z: int, f: int, packed: bool, generator: torch.Generator
) -> ExpertWeights:
    w13 = torch.randn(count, 2 * f, z, generator=generator) / z**0.5
    w2 = torch.randn(count, z, f, generator=generator) / f**0.5
    if not packed:
        return DenseExperts(first, w13, w2)
    both = [pack(w.flatten(0, 1)) for w in (w13, w2)]
    (p13, s13), (p2, s2) = ([x.unflatten(0, (count, -1)) for x in pair] for pair in both)
    return PackedExperts(first, p13, s13, p2, s2, torch.float32)


def in_dtype(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    match weights:
        case DenseExperts(first, w13, w2):
            return DenseExperts(first, w13.to(dtype), w2.to(dtype))
        case PackedExperts(first, p13, s13, p2, s2, _):
            return PackedExperts(first, p13, s13, p2, s2, dtype)
    raise AssertionError(type(weights))


@pytest.mark.parametrize(
    "tokens, top_k, first, count, z, f, packed, dtype, atol",
    [
        (1, 1, 0, 1, 5, 3, False, torch.float32, 3e-5),
        (18, 3, 2, 4, 70, 37, False, torch.float32, 3e-5),
        (2, 4, 0, 6, 130, 9, False, torch.float16, 2e-2),
        (2, 1, 0, 2, 64, 64, False, torch.float32, 3e-5),
        (17, 2, 1, 2, 96, 32, True, torch.float32, 3e-5),
        (2, 2, 1, 2, 64, 64, True, torch.float16, 2e-2),
        (5, 2, 0, 3, 160, 128, True, torch.float32, 3e-5),
    ],
    ids=str,
)
def test_experts_equal_the_reference(
    tokens: int,
    top_k: int,
    first: int,
    count: int,
    z: int,
    f: int,
    packed: bool,
    dtype: torch.dtype,
    atol: float,
) -> None:
    """Experts before and after those held take part in the choice. Tile and programs are small on purpose."""
    generator = torch.Generator().manual_seed(tokens * z + f)
    weights = some_experts(first, count, z, f, packed, generator)
    everybody = first + count + 2
    ids = torch.rand(tokens, everybody, generator=generator).argsort(-1)[:, :top_k].contiguous()
    weight = torch.rand(tokens, top_k, generator=generator)
    x = torch.randn(tokens, z + 2, generator=generator)[:, 2:].to(dtype)
    tuning = moe.Tuning(rows=32, tokens=16, width=64, stages=1, warps=4, programs=1)
    prepared = TritonMoe(3).prepare(in_dtype(weights, dtype))
    got = moe.experts(x, ids, weight, prepared, 4.0, 25.0, 3, tuning)
    exact = in_dtype(weights, torch.float64)
    expected = reference.experts(x.double(), ids, weight.double(), exact, 4.0, 25.0)
    assert_close(got, expected, atol, "sum of experts")


def test_every_code_and_scale_is_read_as_the_reference_reads_it() -> None:
    """Inputs are unit vectors, so every product is one weight; scales from 2^-61 up."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | (codes.flip(0) << 4)).repeat(1, 64, 1)  # rows of 32 inputs
    scale = torch.linspace(66, 140, 64).to(torch.uint8).view(1, 64, 1)
    w13 = PackedExperts(0, packed, scale, packed[:, :32, :], scale[:, :32], torch.float32)
    x = torch.eye(32)
    ids, weight = torch.zeros(32, 1, dtype=torch.int64), torch.ones(32, 1)
    got = moe.experts(x, ids, weight, TritonMoe(2).prepare(w13), 4.0, 25.0, 2)
    expected = reference.experts(x, ids, weight, w13, 4.0, 25.0)
    relative = (got - expected) / expected.abs().clamp(min=1e-30)
    assert_close(relative, torch.zeros(32, 32), 2e-4, "relative difference")


@pytest.mark.parametrize("z, f", [(32, 32), (96, 160), (128, 256)])
def test_dealt_codes_are_the_same_weights(z: int, f: int) -> None:
    """Blocks that are not full are filled up with zeros."""
    weights = some_experts(1, 3, z, f, True, torch.Generator().manual_seed(z + f))
    assert isinstance(weights, PackedExperts)
    dealt = DealtExperts.of(weights)
    assert dealt.inner.words.shape == (3, 2 * f, -(-z // 128) * 16)
    for expert in range(3):
        assert torch.equal(dealt.w13(expert), weights.w13(expert))
        assert torch.equal(dealt.w2(expert), weights.w2(expert))


def test_no_tokens_give_no_rows() -> None:
    weights = some_experts(0, 2, 8, 4, False, torch.Generator())
    none = torch.zeros(0, 2, dtype=torch.int64)
    assert moe.experts(torch.zeros(0, 8), none, none.float(), weights, 4.0, 25.0, 2).shape == (0, 8)


def test_without_a_clip_of_the_linear_branch() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = some_experts(0, 3, 20, 6, False, generator)
    x, weight = 4 * torch.randn(4, 20, generator=generator), torch.ones(4, 1)
    ids = torch.tensor([[2], [0], [2], [1]])
    got = moe.experts(x, ids, weight, weights, 4.0, None, 2)
    assert_close(got, reference.experts(x, ids, weight, weights, 4.0, None), 1e-4, "sum of experts")
