"""Rows that may draw only what a grammar allows: a mask for every row of logits of a group.

Row j of a group follows j drafts, so its mask is that of the output and those drafts. Once a draft is forbidden nothing
after it is ever drawn, and those rows stay open. The grammar is host code: a step that holds a constrained row first
waits for what earlier steps emitted and for the drafts on the device. Steps without one never do.

Letters: B rows, G group tokens, W = V / 32 words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from k3.edits import WORD, mask_words

OPEN = -1  # all 32 tokens of a word


class Grammar(Protocol):
    """Which tokens may follow the output of one request."""

    def accept(self, token: int) -> None:
        """The output grew by a token; it was allowed."""
        ...

    def allowed(self, ahead: Sequence[int]) -> Sequence[int]:
        """Ids that may follow the output and then `ahead`, at least one; every token of `ahead` is allowed itself."""
        ...


class Masks:
    """Masks of up to `max_rows` groups, in a buffer that steps read."""

    def __init__(self, max_rows: int, group: int, vocab_size: int, device: torch.device) -> None:
        shape = (max_rows, group, mask_words(vocab_size))
        self.words_BGW = torch.full(shape, OPEN, dtype=torch.int32, device=device)

    def fill(self, grammars: Sequence[Grammar | None], drafts_BK: Sequence[Sequence[int]]) -> None:
        """Overwrite the groups of a step. drafts: the real ones of each row."""
        n = len(grammars)
        words = torch.full((n, *self.words_BGW.shape[1:]), OPEN, dtype=torch.int32)
        for b, grammar in enumerate(grammars):
            if grammar is not None:
                _constrain(words[b], grammar, drafts_BK[b])
        self.words_BGW[:n].copy_(words)


def _constrain(words_GW: Tensor, grammar: Grammar, drafts: Sequence[int]) -> None:
    for j in range(len(drafts) + 1):
        allowed = grammar.allowed(drafts[:j])
        words_GW[j] = pack(allowed, words_GW.shape[1])
        if j < len(drafts) and drafts[j] not in allowed:
            return


def pack(ids: Sequence[int], n_words: int) -> Tensor:
    """A mask of these ids, int32 [W], lowest bit first."""
    bits = torch.zeros(n_words * WORD, dtype=torch.int64)
    bits[torch.tensor(list(ids), dtype=torch.int64)] = 1
    words = (bits.view(n_words, WORD) << torch.arange(WORD)).sum(1)
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32)
