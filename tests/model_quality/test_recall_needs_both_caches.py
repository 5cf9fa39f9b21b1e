"""Long recall depends on the latent cache and on the recurrent state: with either zeroed at hand-over it is gone.

So a fault of the transfer shows in answers, not only in logits. Runs the model in this process: prefill all prompts
once, then decode from the same caches whole, without latents, and without recurrent states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from k3.bench.scoring import is_right, response_of
from k3.bench.suites import Item, longest_answer, read
from router.text.folder import ModelFolder, load_model_folder
from router.text.template import ChatOptions
from tests.model_runner import Pools, solo_stage

pytestmark = pytest.mark.slow

SUITE, N_ITEMS, CHUNK = "passkey_1k", 5, 256
LOST = {"latents": ("latent",), "recurrent states": ("kda", "conv")}


class HandedOver:
    """The caches of all items right after prefill, with the first token of each."""

    def __init__(self, folder: Path, items: Sequence[Item]) -> None:
        self.text: ModelFolder = load_model_folder(folder, "under-test")
        self.items = items
        prompts = [self._prompt(item) for item in items]
        longest = max(map(len, prompts)) + longest_answer(SUITE)
        self.pools = Pools(solo_stage(folder, "float32"), len(items), longest, page_tokens=32)
        self.first = [
            int(self.pools.prefill(request, ids, CHUNK)[-1].argmax())
            for request, ids in zip(self.pools.requests, prompts, strict=True)
        ]
        self.lengths = [request.length for request in self.pools.requests]
        self.caches = {name: pool.clone() for name, pool in self.pools.storage.pools.items()}

    def _prompt(self, item: Item) -> list[int]:
        rendered = self.text.template.render([dict(turn) for turn in item.turns], ChatOptions())
        return self.text.tokenizer.encode_segments(rendered.segments)

    def n_right(self, lost: Sequence[str] = ()) -> int:
        """Right answers when decode finds the fields of `lost` zeroed."""
        for name, pool in self.pools.storage.pools.items():
            pool.copy_(torch.zeros_like(pool) if name in lost else self.caches[name])
        for request, length in zip(self.pools.requests, self.lengths, strict=True):
            request.length, request.read_column = length, 0
        raws = [
            self.text.tokenizer.decode(ids, skip_special_tokens=False) for ids in self._decode()
        ]
        pairs = zip(self.items, raws, strict=True)
        return sum(
            is_right(item.check, item.answer, response=response_of(raw), raw=raw) is True
            for item, raw in pairs
        )

    def _decode(self) -> list[list[int]]:
        """Greedy continuations, all items in one batch; tokens after an end are dropped."""
        answers = [[token] for token in self.first]
        ends = set(self.text.eos_token_ids)
        while len(answers[0]) < longest_answer(SUITE) and not all(ends & set(a) for a in answers):
            groups = [(r, a[-1:]) for r, a in zip(self.pools.requests, answers, strict=True)]
            logits = self.pools.verify(groups, [0] * len(groups))[:, 0]
            for answer, token in zip(answers, logits.argmax(-1).tolist(), strict=True):
                answer.append(token)
        return answers


@pytest.fixture(scope="module")
def handed_over(folder: Path) -> HandedOver:
    return HandedOver(folder, read(SUITE, N_ITEMS))


def test_whole_caches_answer_every_question(handed_over: HandedOver) -> None:
    assert handed_over.n_right() == N_ITEMS


@pytest.mark.parametrize("lost", LOST)
def test_recall_is_gone_without_one_kind_of_cache(handed_over: HandedOver, lost: str) -> None:
    assert handed_over.n_right(LOST[lost]) == 0
