"""Tokens drawn by the native library are those of torch's definition, whatever is drawn beside them."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.cpu import library
from k3_kernels.cpu.draft_ops import NativeDraft
from k3_kernels.draws import draw
from torch import Tensor

from k3.sampling import Flavour, Params, Recipe

pytestmark = pytest.mark.skipif(not library.is_built(), reason="no C++ compiler at install")
NEG_INF = float("-inf")
ALL = Flavour(greedy=True, sampled=True, top_k=True, top_p=True, min_p=True)
TEMPERATURES, MIN_PS = (1.0, 0.7, 1.5, 0.05), (0.0, 0.0, 0.02, 0.5, 1.0)
TOP_PS, TOP_KS = (1.0, 0.95, 0.5, 1e-9, 0.999999, 1 - 2**-53), (0, 1, 2, 20, 200, 10**6)
REQUESTS = len(TEMPERATURES) * len(TOP_PS) * len(TOP_KS)


def params() -> Params:
    """Every temperature with every top_p and top_k; random seeds; every seventh request is greedy."""
    reals, whole = (
        Params.empty(REQUESTS, "cpu").reals,
        torch.randint(-(2**63), 2**63 - 1, (REQUESTS, 4)),
    )
    kinds = torch.cartesian_prod(*(torch.arange(len(x)) for x in (TEMPERATURES, TOP_PS, TOP_KS)))
    for column, values in enumerate((TEMPERATURES, TOP_PS)):
        reals[:, column] = torch.tensor(values, dtype=torch.float64)[kinds[:, column]]
    reals[:, 2] = torch.tensor(MIN_PS, dtype=torch.float64).repeat(REQUESTS)[:REQUESTS]
    whole[:, 2] = torch.tensor(TOP_KS)[kinds[:, 2]]
    whole[:, 3] = torch.arange(REQUESTS) % 7 == 0
    return Params(reals, whole)


def rows(kind: str, vocabulary: int) -> Tensor:
    """Scores [B, 2, V]."""
    x = torch.randn(REQUESTS, 2, vocabulary) * 4
    match kind:
        case "flat":
            return x / 64
        case "equal":
            return torch.zeros_like(x)
        case "ties":
            return (x / 2).round()
        case "masked":
            x[..., : vocabulary // 2] = NEG_INF
            x[::2, 0, :-1] = NEG_INF
            return x
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sharp", "flat", "equal", "ties", "masked"])
@pytest.mark.parametrize("vocabulary", [1, 5, 300, 4100])
def test_tokens_are_those_of_the_definition(vocabulary: int, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(vocabulary)
    scores, position = rows(kind, vocabulary).to(dtype), torch.randint(0, 2**40, (REQUESTS, 2))
    p, by = params(), draw(NativeDraft())
    want = Recipe(p, ALL).draw(scores, position)
    assert torch.equal(Recipe(p, ALL, by=by).draw(scores, position), want)


def test_a_row_is_drawn_the_same_in_any_company_and_place() -> None:
    torch.manual_seed(0)
    some, position = rows("sharp", 90)[:, :, :83], torch.arange(2).expand(REQUESTS, 2)
    by, p = draw(NativeDraft()), params()
    together = Recipe(p, ALL, by=by).draw(some, position)
    for b in range(REQUESTS):
        alone = Recipe(Params(p.reals[b : b + 1], p.whole[b : b + 1]), ALL, by=by)
        assert torch.equal(alone.draw(some[b : b + 1].clone(), position[:1])[0], together[b])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), NEG_INF])
def test_rows_nobody_should_have_give_the_best_token(poison: float) -> None:
    scores = torch.zeros(REQUESTS, 1, 9)
    scores[..., 4 if poison > 0 or poison != poison else slice(None)] = poison
    position = torch.zeros(REQUESTS, 1, dtype=torch.int64)
    drawn = Recipe(params(), ALL, by=draw(NativeDraft())).draw(scores, position)
    assert torch.equal(drawn, scores.argmax(-1))
