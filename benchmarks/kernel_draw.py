"""Drawing tokens under temperature, top_k and top_p from bfloat16 logits of Kimi-K3's vocabulary, beside torch's sort.

`sharp` rows are those of a sure model, p ~ rank^-2.5; `flat` ones are normal with a deviation of 2, where top_p keeps
tens of thousands of tokens. Eight rows are the group of one request, 256 those of 32. Floor: every logit read once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import Row, Stopwatch
from k3_kernels.draws import draw
from k3_kernels.triton.dense_ops import TritonDense
from torch import Tensor

from k3.sampling import Flavour, Params, Recipe

TITLE = "Draw of tokens"
VOCABULARY, GROUP = 163840, 8
LIMITS = {
    "temperature": (1.0, 0),
    "top_p": (0.95, 0),
    "top_k": (1.0, 20),
    "top_k and top_p": (0.95, 50),
}
ERROR_LIMIT = (
    1e-2  # of tokens drawn otherwise than in float64, where the random number lies on an edge
)


@dataclass(frozen=True, slots=True)
class DrawCase:
    """What limits the draw, of how many requests, from which distribution."""

    what: str
    n_requests: int
    shape: str

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.what}, {self.shape}, {self.n_requests} x {GROUP}"


def cases() -> list[DrawCase]:
    """One request and a full step."""
    return [
        DrawCase(what, n, shape) for what in LIMITS for shape in ("sharp", "flat") for n in (1, 32)
    ]


def make(case: DrawCase) -> Tensor:
    """Logits [B, G, V]."""
    shape = (case.n_requests, GROUP, VOCABULARY)
    if case.shape == "flat":
        return (torch.randn(shape, device="cuda") * 2).bfloat16()
    rank = torch.rand(shape, device="cuda").argsort(-1) + 1
    return (20 - 2.5 * rank.float().log()).bfloat16()


def run(case: DrawCase, wanted: Callable[[str], bool]) -> list[Row]:
    """Ours and torch's."""
    torch.manual_seed(case.n_requests)
    n, (top_p, top_k) = case.n_requests, LIMITS[case.what]
    logits = make(case)
    reals = torch.tensor([[0.8, top_p, 0.0]], dtype=torch.float64, device="cuda").repeat(n, 1)
    whole = torch.tensor([[0, 0, top_k, 0]], device="cuda").repeat(n, 1)
    whole[:, 0] = torch.arange(n)
    position = torch.arange(n * GROUP, device="cuda").view(n, GROUP)
    flavour = Flavour(sampled=True, top_k=top_k > 0, top_p=top_p < 1)
    by_torch = Recipe(Params(reals, whole), flavour)
    ours = Recipe(Params(reals, whole), flavour, by=draw(TritonDense()))
    calls = {"ours": ours} | ({"torch": by_torch} if wanted("torch") else {})
    want = by_torch.draw(logits.float(), position)
    watch = Stopwatch(10)
    return [
        Row(
            case.name,
            backend,
            float((recipe.draw(logits, position) != want).double().mean()),
            ERROR_LIMIT,
            watch.time_us(lambda recipe=recipe: recipe.draw(logits, position)),
            2.0 * logits.numel(),
            0.0,
        )
        for backend, recipe in calls.items()
    ]


def missing_peers() -> list[str]:
    """torch is always here."""
    return []
