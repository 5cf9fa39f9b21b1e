"""Tokens drawn on a GPU are those of torch's definition, at Kimi-K3's vocabulary."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.draws import draw
from k3_kernels.triton.dense_ops import TritonDense

from k3.sampling import Flavour, Params, Recipe

VOCABULARY, REQUESTS, GROUP = 163840, 6, 8


def params() -> Params:
    reals = torch.ones(REQUESTS, 3, dtype=torch.float64)
    reals[:, 0] = torch.linspace(0.3, 1.4, REQUESTS)
    reals[:, 1] = torch.tensor([0.95, 1.0, 0.5, 1.0, 0.9, 1.0])
    reals[:, 2] = torch.tensor([0.0, 0.05, 0.0, 0.0, 0.01, 0.0])
    whole = torch.zeros(REQUESTS, 4, dtype=torch.int64)
    whole[:, 0] = torch.arange(REQUESTS) * 2**60
    whole[:, 2] = torch.tensor([0, 40, 20, 0, 70000, 0])
    whole[-1, 3] = 1
    return Params(reals.cuda(), whole.cuda())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("deviation", [0.2, 2.0, 6.0])
def test_tokens_are_those_of_the_definition(dtype: torch.dtype, deviation: float) -> None:
    torch.manual_seed(7)
    scores = torch.randn(REQUESTS, GROUP, VOCABULARY, device="cuda") * deviation
    scores = scores.to(dtype)
    position = torch.randint(0, 2**20, (REQUESTS, GROUP), device="cuda")
    for limited in (True, False):
        flavour = Flavour(True, True, limited, limited, min_p=True)
        want = Recipe(params(), flavour).draw(scores.float(), position)
        recipe = Recipe(params(), flavour, by=draw(TritonDense()))
        assert torch.equal(recipe.draw(scores, position), want)


def test_a_captured_draw_follows_what_its_buffers_hold() -> None:
    torch.manual_seed(8)
    p, flavour = params(), Flavour(True, True, True, True, min_p=True)
    recipe = Recipe(p, flavour, by=draw(TritonDense()))
    scores = torch.zeros(REQUESTS, GROUP, 999, device="cuda")
    position = torch.zeros(REQUESTS, GROUP, dtype=torch.int64, device="cuda")
    recipe.draw(scores, position)
    graph = torch.cuda.CUDAGraph()  # noqa: TID251
    with torch.cuda.graph(graph):  # noqa: TID251
        drawn = recipe.draw(scores, position)
    scores.normal_()
    position.random_(0, 1000)
    p.reals[:, 0] *= 0.5
    graph.replay()
    assert torch.equal(drawn, Recipe(p, flavour).draw(scores, position))
