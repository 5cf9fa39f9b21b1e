"""The truth that served tokens are compared with: one process, no cache, one forward over prompt and answer.

Token i of an answer must be what sampling draws from the logits of the whole sequence before it. Checking every token
of an answer against one causal forward of `prompt + answer` is the same as re-running the model per token: each step
sees exactly the tokens before it. An answer that comes again is not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from k3_kernels.api import Backends, select

from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.model.batch import ChunkBatch
from k3.model.registry import open_stage
from k3.model.spec import K3Spec
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import SOLO
from k3.sampling import Recipe, RowSampling, TokenCounts, sample
from k3.types import LogprobParams, SamplingParams, TokenEvent

CPU = torch.device("cpu")


class Oracle:
    """One model, loaded once."""

    def __init__(self, folder: Path, dtype: str = "float64") -> None:
        self.spec = K3Spec.from_folder(folder)
        self._dtype = dtype
        self._known: dict[tuple[int, ...], torch.Tensor] = {}
        self._stage = open_stage(
            folder, SOLO, solo_groups(), select(Backends(), CPU), dtype=dtype, device=CPU
        )

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [T, vocab] of every position, from zero state and empty caches."""
        ids = tuple(token_ids)
        if ids not in self._known:
            self._known[ids] = self._compute(ids)
        return self._known[ids]

    def _compute(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        n = len(token_ids)
        layout = build_layout(self.spec, SOLO.mesh, 0, page_tokens=n, dtype=self._dtype)
        storage = Storage(layout, 1, 1, CPU, fill_nan=True)
        batch = ChunkBatch(
            token_ids_T=torch.tensor(token_ids),
            cu_lens=(0, n),
            starts=(0,),
            page_table_RW=torch.zeros((1, 1), dtype=torch.int32),
            slot_T=torch.arange(n),
            read_slots=(-1,),
            write_slots=(0,),
        )
        output = self._stage.forward(None, storage.caches(), batch)
        return self._stage.logits(self._stage.hidden(output.frame))

    def redraw(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        params: SamplingParams,
        logprobs: LogprobParams | None = None,
    ) -> list[TokenEvent]:
        """For every position of `answer`, the token that should stand there given all tokens before it."""
        n = len(prompt)
        rows = self.logits([*prompt, *answer[:-1]])[n - 1 :]
        how = RowSampling(params, (), logprobs or LogprobParams(), output_start=n)
        drawn: list[TokenEvent] = []
        for i in range(len(answer)):
            counts = self._counts(prompt, answer[:i], params)
            drawn += sample(rows[i : i + 1], [how], [n + i], [counts])
        return drawn

    def probabilities(
        self, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams
    ) -> list[float]:
        """How likely every token of `answer` was, filters and all; 1 or 0 where drawing is greedy."""
        n, vocab = len(prompt), self.spec.vocab_size
        rows = self.logits([*prompt, *answer[:-1]])[n - 1 :]
        how = RowSampling(params, (), LogprobParams(), output_start=n)
        found: list[float] = []
        for i, token in enumerate(answer):
            counts = self._counts(prompt, answer[:i], params)
            recipe = Recipe.of([how], [counts], vocab_size=vocab)
            scores = recipe.scores(rows[i].view(1, 1, vocab), torch.tensor([[n + i]]))
            found.append(recipe.probabilities(scores)[0, 0, token].item())
        return found

    def _counts(
        self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
    ) -> TokenCounts | None:
        if not params.needs_counts:
            return None
        return TokenCounts(self.spec.vocab_size, prompt_ids=prompt, output_ids=list(output))
