"""What a drafter learns from: sequences, and the frozen target's taps and final hidden states over them.

Short sequences are prompts of the corpus continued by the target itself at temperature 0, 0.7 and 1. Recall
documents of 1k and 4k tokens keep their gold answers, which the target repeats anyway; that gives several answers per
long pass.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.data.mixture import ANSWER, Document, Maker, Mixture
from training.evaluate import Model
from training.kernels import Layout
from training.recipe import DrafterRecipe

_SHARES = {
    "arithmetic": 0.48,
    "copy": 0.12,
    "lists": 0.12,
    "tools": 0.08,
    "short_recall": 0.10,
    "chat": 0.05,
    "open": 0.05,
}
_TEMPERATURES = (0.0, 0.7, 1.0)
_GROUP_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class Recorded:
    """Ids and the positions that count as generated (at or after `first`, where `answer` holds)."""

    ids: list[int]
    answer: bytes


@dataclass(frozen=True, slots=True)
class Store:
    """All sequences, flat: ids, answer (bool) [T], taps [T, m*Ht], hidden [T, Ht] (final-normed), starts [n+1] host."""

    ids: Tensor
    answer: Tensor
    taps: Tensor
    hidden: Tensor
    starts: Tensor

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence [n]."""
        return self.starts[1:] - self.starts[:-1]


def short_prompts(maker: Maker, recipe: DrafterRecipe) -> dict[str, list[list[int]]]:
    """Prompts per task, cut before the first answer token."""
    rng = random.Random(f"draft prompts {recipe.seed}")
    out: dict[str, list[list[int]]] = {}
    for task, share in _SHARES.items():
        n = max(1, round(recipe.n_prompts * share))
        out[task] = [_cut(maker.task(task, rng)) for _ in range(n)]
    return out


def _cut(document: Document) -> list[int]:
    return document.ids[: document.classes.index(ANSWER)]


def sequences(model: Model, recipe: DrafterRecipe) -> list[Recorded]:
    """All training sequences of a drafter."""
    maker = Maker(model.codec, Mixture())
    generator = model.generator()
    torch.manual_seed(recipe.seed)
    out: list[Recorded] = []
    for prompts in short_prompts(maker, recipe).values():
        for a in range(0, len(prompts), recipe.generate_batch):
            batch = prompts[a : a + recipe.generate_batch]
            heat = [_TEMPERATURES[i % 3] for i in range(len(batch))]
            answers = generator.run(batch, recipe.max_new, heat)
            for prompt, answer in zip(batch, answers, strict=True):
                out.append(Recorded(prompt + answer, bytes(len(prompt)) + b"\1" * len(answer)))
    rng = random.Random(f"draft documents {recipe.seed}")
    for n, low, high in ((recipe.n_middle, 500, 1150), (recipe.n_long, 1500, 4200)):
        for _ in range(n):
            document = maker.recall_document(rng, rng.randint(low, high))
            out.append(Recorded(document.ids, bytes(kind == ANSWER for kind in document.classes)))
    return out


@torch.no_grad()
def run_target(model: Model, items: Sequence[Recorded], taps: tuple[int, ...]) -> Store:
    """Taps and hidden states of all sequences, on the model's device."""
    lengths = torch.tensor([len(s.ids) for s in items])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    total, width = int(starts[-1]), model.target.dims.hidden
    device, dtype = model.device, model.params.dtype
    ids = torch.tensor([t for s in items for t in s.ids], device=device)
    answer = torch.tensor([b for s in items for b in s.answer], dtype=torch.bool, device=device)
    tap_rows = torch.empty(total, len(taps) * width, device=device, dtype=dtype)
    hidden = torch.empty(total, width, device=device, dtype=dtype)
    first = 0
    while first < len(items):
        last = first + 1
        while last < len(items) and int(starts[last + 1] - starts[first]) <= _GROUP_TOKENS:
            last += 1
        here = slice(int(starts[first]), int(starts[last]))
        layout = Layout.of(starts[first : last + 1] - starts[first], device)
        traced = model.target(ids[here], layout, model.params, taps=taps)
        tap_rows[here] = torch.cat(traced.taps, -1)
        hidden[here] = traced.hidden
        first = last
    return Store(ids, answer, tap_rows, hidden, starts)
