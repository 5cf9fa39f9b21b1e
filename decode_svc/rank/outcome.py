"""What a step drew, from the device's fixed buffers to the host's tokens.

`Drawn` is a set of such buffers: one on the device that every step overwrites, one in staging memory per step that
may be unread. Log probabilities are taken inside the step, because its logits do not outlive it.
Letters: B rows, G group tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from k3.device import Event
from k3.sampling import MAX_TOP, Flavour, RowSampling, raw_logprobs
from k3.types import TokenEvent

Empty = Callable[..., Tensor]  # (*shape, dtype=...) -> memory


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens: [B, G + 1], tokens of the group as they are emitted and the number of accepted drafts.

    logprobs: [B, G, 1 + N] float64, of each token and of the N most likely ones, whose ids are top_ids [B, G, N].
    confidence: [B, K] float32, of the drafts proposed for the next step; empty where nobody asks for it.
    """

    tokens: Tensor
    logprobs: Tensor
    top_ids: Tensor
    confidence: Tensor

    @classmethod
    def empty(
        cls, n_rows: int, group: int, vocab_size: int, n_confidences: int, make: Empty
    ) -> Drawn:
        """Room for up to `n_rows` rows."""
        top = min(MAX_TOP, vocab_size)
        return cls(
            make(n_rows, group + 1, dtype=torch.int64),
            make(n_rows, group, 1 + top, dtype=torch.float64),
            make(n_rows, group, top, dtype=torch.int64),
            make(n_rows, n_confidences, dtype=torch.float32),
        )

    def buffers(self) -> dict[str, Tensor]:
        """By name."""
        return {
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "top_ids": self.top_ids,
            "confidences": self.confidence,
        }

    def write(self, drawn_BX: Tensor, logits_BGV: Tensor, flavour: Flavour) -> None:
        """Overwrite the first B rows with a step's tokens, and what was asked for about them.

        The step's groups may be narrower than the buffers'. Logits of a plain flavour are not looked at.
        """
        n, group = logits_BGV.shape[:2]
        self.tokens[:n, :group].copy_(drawn_BX[:, :-1])
        self.tokens[:n, -1].copy_(drawn_BX[:, -1])
        if not flavour.logprobs:
            return
        logprobs = raw_logprobs(logits_BGV)
        self.logprobs[:n, :group, :1].copy_(logprobs.gather(2, drawn_BX[:, :-1].unsqueeze(2)))
        if flavour.top_logprobs:
            best, ids = logprobs.topk(self.top_ids.shape[2], dim=-1)
            self.logprobs[:n, :group, 1:].copy_(best)
            self.top_ids[:n, :group].copy_(ids)

    def read(self, source: Drawn, n: int, flavour: Flavour) -> None:
        """Start copying what a step of that flavour wrote."""
        self.tokens[:n].copy_(source.tokens[:n], non_blocking=True)
        if self.confidence.numel():
            self.confidence[:n].copy_(source.confidence[:n], non_blocking=True)
        if flavour.logprobs:
            self.logprobs[:n].copy_(source.logprobs[:n], non_blocking=True)
            self.top_ids[:n].copy_(source.top_ids[:n], non_blocking=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step on its way to the host.

    sampling: of the rows of the step, without padding. host: staging memory, good once `event` is complete; reused
    `depth` steps later. forward_s: seconds inside the model, of the launch on a GPU. proposed: drafts follow it.
    """

    sampling: tuple[RowSampling, ...]
    host: Drawn
    event: Event
    forward_s: float
    proposed: bool = True

    def confidence(self) -> list[list[float]]:
        """Per row, of the drafts that were proposed for its next group; nothing where nothing is known."""
        self.event.synchronize()
        n = len(self.sampling)
        return self.host.confidence[:n].tolist() if self.proposed else [[] for _ in range(n)]

    def tokens(self) -> list[list[int]]:
        """Per row the tokens emitted: accepted drafts and the bonus. Waits for the event, not for later steps."""
        self.event.synchronize()
        drawn = self.host.tokens[: len(self.sampling)].tolist()
        return [row[: row[-1] + 1] for row in drawn]

    def answers(self) -> list[list[TokenEvent]]:
        """`tokens` with the log probabilities that were asked for."""
        return [
            self._with_logprobs(b, ids)
            if self.sampling[b].logprobs.enabled
            else [TokenEvent(i) for i in ids]
            for b, ids in enumerate(self.tokens())
        ]

    def _with_logprobs(self, b: int, ids: list[int]) -> list[TokenEvent]:
        n_top = min(self.sampling[b].logprobs.top, self.host.top_ids.shape[2])
        values = self.host.logprobs[b, : len(ids), : 1 + n_top].tolist()
        tops = self.host.top_ids[b, : len(ids), :n_top].tolist()
        return [
            TokenEvent(i, value[0], tuple(zip(top, value[1:], strict=True)))
            for i, value, top in zip(ids, values, tops, strict=True)
        ]
