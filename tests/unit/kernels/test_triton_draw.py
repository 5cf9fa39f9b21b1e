"""Tokens drawn by Triton's kernel, in the interpreter, are those of torch's definition."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.draws import draw
from k3_kernels.triton import draw as kernel
from k3_kernels.triton.dense_ops import TritonDense
from torch import Tensor

from k3.sampling import Flavour, Params, Recipe, RowSampling, sample
from k3.types import LogprobParams, SamplingParams

REQUESTS = 5
NEG_INF = float("-inf")


def params() -> Params:
    """Temperature, top_p, min_p; seed, sample, top_k, whether greedy."""
    reals = [(1.0, 0.9, 0), (0.7, 1, 0.1), (1.5, 0.5, 0.02), (1, 0.3, 0), (0.05, 0.999, 0)]
    whole = [(2**63 - 5, 0, 0, 0), (2, 3, 5, 0), (3, 2**40, 50, 0), (4, 0, 0, 1), (5, 1, 10**6, 0)]
    return Params(torch.tensor(reals, dtype=torch.float64), torch.tensor(whole))


def rows(kind: str, vocabulary: int) -> Tensor:
    """Scores [B, 2, V]."""
    x = torch.randn(REQUESTS, 2, vocabulary) * 4
    match kind:
        case "flat":
            return x / 16
        case "ties":
            return (x / 2).round()
        case "masked":
            x[..., : vocabulary // 2] = NEG_INF
            x[0, 0, :-1] = NEG_INF
            return x
    return x


@pytest.mark.parametrize("kind", ["sharp", "flat", "ties", "masked"])
@pytest.mark.parametrize(("vocabulary", "block"), [(5, 4096), (300, 4096), (300, 64)])
def test_tokens_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, kind: str, vocabulary: int, block: int
) -> None:
    """block=64: rows of several blocks, of which nearly all is too much to be copied aside."""
    monkeypatch.setattr(kernel, "BLOCK", block)
    torch.manual_seed(vocabulary + block)
    scores, position = rows(kind, vocabulary), torch.randint(0, 2**40, (REQUESTS, 2))
    for limited in (True, False):
        flavour = Flavour(True, True, limited, limited, min_p=True)
        want = Recipe(params(), flavour).draw(scores, position)
        got = Recipe(params(), flavour, by=draw(TritonDense())).draw(scores, position)
        assert torch.equal(got, want), limited


def test_a_row_is_drawn_the_same_in_any_company_and_dtype() -> None:
    torch.manual_seed(0)
    some, position = rows("sharp", 90).half(), torch.arange(2).expand(REQUESTS, 2)
    flavour = Flavour(True, True, True, True)
    by, p = draw(TritonDense()), params()
    together = Recipe(p, flavour, by=by).draw(some, position)
    for b in range(REQUESTS):
        alone = Recipe(Params(p.reals[b : b + 1], p.whole[b : b + 1]), flavour, by=by)
        assert torch.equal(alone.draw(some[b : b + 1].float(), position[:1])[0], together[b])


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), NEG_INF])
def test_rows_nobody_should_have_give_some_token(poison: float, first: int) -> None:
    scores = torch.zeros(REQUESTS, 1, 9)
    scores[:, :, first:] = poison
    flavour = Flavour(True, True, True, True, min_p=True)
    drawn = Recipe(params(), flavour, by=draw(TritonDense())).draw(
        scores, torch.zeros(REQUESTS, 1, dtype=torch.int64)
    )
    assert ((drawn >= 0) & (drawn < 9)).all()


def test_other_strides_between_rows_are_followed() -> None:
    torch.manual_seed(3)
    scores, position = rows("sharp", 40)[:, :, :33], torch.zeros(REQUESTS, 2, dtype=torch.int64)
    recipe = Recipe(params(), Flavour(True, True, True, True), by=draw(TritonDense()))
    assert torch.equal(recipe.draw(scores, position), recipe.draw(scores.contiguous(), position))


def test_first_tokens_of_prompts_are_those_of_the_definition() -> None:
    """With log probabilities and edits, as prefill draws them."""
    torch.manual_seed(4)
    logits = torch.randn(3, 50) * 3
    requests = [
        RowSampling(SamplingParams(temperature=0.8, top_p=0.9, seed=3, logit_bias={7: 5.0})),
        RowSampling(
            SamplingParams(temperature=1.2, top_k=6, seed=4), logprobs=LogprobParams(True, 2)
        ),
        RowSampling(SamplingParams(temperature=0.0)),
    ]
    by = draw(TritonDense())
    assert sample(logits, requests, [9, 10, 11], by=by) == sample(logits, requests, [9, 10, 11])
