"""Exact cheap rollouts: the target's continuation once, the drafter at every position of it, then the walk n -> n+a+1.

For greedy drafts under the match rule the continuation does not depend on the drafts, so this is the true law of
speculative decoding at temperature 0 and 1.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from training.draft_data import Recorded, Store, run_target
from training.drafter import Blocks, DraftDims, Drafter, Params, markov_bias
from training.evaluate import Model

_TOGETHER = 16
_ANCHORS = 32


class DraftAblation(enum.Enum):
    """What is broken on purpose at inference, same weights."""

    NONE = "full"
    NO_MARKOV = "markov_off"
    SHUFFLED_TAPS = "taps_shuffled"
    SLOT_OFF = "slots_off_by_one"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Emitted tokens per verify step and P(a >= i), i = 1..k, over `steps` steps."""

    length: float
    at_least: tuple[float, ...]
    steps: int
    emitted: int

    def report(self) -> dict[str, object]:
        """Rounded, for JSON."""
        at_least = [round(x, 3) for x in self.at_least]
        return {
            "length": round(self.length, 3),
            "p_at_least": at_least,
            "steps": self.steps,
            "emitted": self.emitted,
        }


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Continuations of one suite with taps: where each begins, and the store."""

    store: Store
    prompt_lengths: tuple[int, ...]


def record(
    model: Model,
    prompts: Sequence[list[int]],
    max_new: int,
    temperature: float,
    taps: tuple[int, ...],
) -> Trajectories:
    """The target's continuations of `prompts` and its taps over them."""
    answers = model.generator().run(prompts, max_new, temperature)
    sequences = [
        Recorded(p + a, bytes(len(p)) + b"\1" * len(a))
        for p, a in zip(prompts, answers, strict=True)
    ]
    return Trajectories(run_target(model, sequences, taps), tuple(map(len, prompts)))


class Rollout:
    """One drafter over recorded trajectories."""

    def __init__(self, model: Model, dims: DraftDims, params: Params) -> None:
        self.model, self.dims, self.params = model, dims, params
        self.drafter = Drafter(dims)
        self.embedding = model.params.top["embed_tokens.weight"].to(model.params.dtype)
        self.head = model.params.top["lm_head.weight"].to(model.params.dtype)

    @torch.no_grad()
    def acceptance(
        self,
        recorded: Trajectories,
        window: int | None = None,
        ablation: DraftAblation = DraftAblation.NONE,
    ) -> Acceptance:
        """Walk every trajectory; steps that reach its end emit what is left."""
        store, k = recorded.store, self.dims.block
        steps = emitted = 0
        counts = [0] * k
        prompts = recorded.prompt_lengths
        for first in range(0, len(prompts), _TOGETHER):
            group = range(first, min(first + _TOGETHER, len(prompts)))
            accepted = self._accepted(store, [(at, prompts[at]) for at in group], window, ablation)
            for at, row in zip(group, accepted, strict=True):
                last = int(store.lengths[at]) - 1
                n = prompts[at]  # the first anchor: the token sampled at prefill
                while n < last:
                    a = row[n - prompts[at]]
                    steps += 1
                    emitted += min(a + 1, last - n)
                    for i in range(a):
                        counts[i] += 1
                    n += a + 1
        length = emitted / max(1, steps)
        return Acceptance(length, tuple(c / max(1, steps) for c in counts), steps, emitted)

    def _accepted(
        self,
        store: Store,
        group: list[tuple[int, int]],
        window: int | None,
        ablation: DraftAblation,
    ) -> list[list[int]]:
        """Accepted drafts at the anchors prompt, prompt + 1, ... of each (trajectory, prompt length) of a group."""
        d, k, device = self.dims, self.dims.block, store.ids.device
        at = torch.tensor([at for at, _ in group])
        starts, lengths = (
            store.starts[at].to(device)[:, None],
            store.lengths[at].to(device)[:, None],
        )
        first = torch.tensor([prompt for _, prompt in group], device=device)[:, None]
        place = torch.arange(int(lengths.max()), device=device)[None]
        inside = place < lengths
        source = place.expand_as(inside)
        if ablation is DraftAblation.SHUFFLED_TAPS:
            noise = torch.rand(inside.shape, generator=torch.Generator().manual_seed(5)).to(device)
            source = (noise + 2.0 * ~inside).argsort(1)
        taps = store.taps[torch.where(inside, starts + source, starts)]
        context_position = torch.where(inside, place, -1)
        out: list[Tensor] = []
        for a in range(0, int((lengths - first).max()), _ANCHORS):
            anchors = (first + a + torch.arange(_ANCHORS, device=device)).minimum(lengths - 1)
            tokens = torch.full((*anchors.shape, k), d.mask_id, device=device)
            tokens[..., 0] = store.ids[starts + anchors]
            inputs = self.embedding[tokens].flatten(1, 2)
            blocks = Blocks(taps, context_position, anchors, inputs, window)
            base = F.linear(self.drafter.hidden(blocks, self.params), self.head).float()
            drafts = self._chain(base.flatten(0, 1), tokens[..., 0].flatten(), ablation)
            position = anchors[..., None] + 1 + torch.arange(k, device=device)
            truth = store.ids[(starts[..., None] + position).clamp(max=len(store.ids) - 1)]
            truth = torch.where(position < lengths[..., None], truth, -1)
            right = (drafts.view(*anchors.shape, k) == truth).long()
            out.append(right.cumprod(-1).sum(-1))
        return torch.cat(out, 1).tolist()

    def _chain(self, base: Tensor, previous: Tensor, ablation: DraftAblation) -> Tensor:
        """Greedy drafts [n, k] from base logits [n, k, V], left to right through the Markov head."""
        base[..., self.dims.mask_id] = float("-inf")
        match ablation:
            case DraftAblation.SLOT_OFF:
                base = torch.cat((base[:, 1:], base[:, -1:]), 1)
            case DraftAblation.NONE | DraftAblation.NO_MARKOV | DraftAblation.SHUFFLED_TAPS:
                pass
            case _:
                assert_never(ablation)
        drafts: list[Tensor] = []
        for i in range(self.dims.block):
            logits = base[:, i]
            if ablation is not DraftAblation.NO_MARKOV:
                logits = logits + markov_bias(previous, self.params).float()
            previous = logits.argmax(-1)
            drafts.append(previous)
        return torch.stack(drafts, 1)


def pooled(parts: Sequence[Acceptance]) -> Acceptance:
    """All steps of several suites together."""
    steps = sum(p.steps for p in parts)
    emitted = sum(p.emitted for p in parts)
    k = len(parts[0].at_least)
    at_least = tuple(sum(p.at_least[i] * p.steps for p in parts) / max(1, steps) for i in range(k))
    return Acceptance(emitted / max(1, steps), at_least, steps, emitted)
