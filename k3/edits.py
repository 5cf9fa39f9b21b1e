"""What changes logits before a token is drawn from them: bias, penalties, the min_tokens ban, masks.

A verify group is edited as a whole: row j of a request counts the drafts before it as generated, so a group gives what
one token at a time would give. The tables are dense, one row per request, and live on the device for good; a step reads
the rows of its batch and, once its group is judged, counts what was emitted.

Letters: R table rows, B requests, G tokens of a verify group, K = G - 1 drafts, V vocabulary, W = V / 32 words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3.device import uploaded
from k3.types import SamplingParams

NEG_INF = float("-inf")
WORD = 32  # tokens per word of a mask
NO_PENALTIES = (1.0, 0.0, 0.0)  # repetition, frequency, presence


class TokenCounts:
    """Tokens of one request as its penalties see them; only for requests with `params.needs_counts`."""

    def __init__(
        self,
        vocab_size: int,
        *,
        prompt_ids: Sequence[int] = (),
        output_ids: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.generated_V = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.in_prompt_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        if prompt_ids:
            self.in_prompt_V[torch.tensor(list(prompt_ids), device=device)] = True
        if output_ids:
            ids = torch.tensor(list(output_ids), device=device)
            self.generated_V.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class Edits:
    """The edits of one batch, copies of table rows; None where no request of the batch has that edit.

    penalties: [B, 3] float64: repetition, frequency, presence. generated, in_prompt: what they look at.
    banned_before: [B]; at earlier positions `ends` are banned.
    """

    bias_BV: Tensor | None = None
    generated_BV: Tensor | None = None
    in_prompt_BV: Tensor | None = None
    penalties: Tensor | None = None
    ends_BV: Tensor | None = None
    banned_before: Tensor | None = None

    def apply(
        self,
        scores_BGV: Tensor,
        position_BG: Tensor,
        drafts_BK: Tensor | None = None,
        allowed_BGV: Tensor | None = None,
    ) -> Tensor:
        """Edit in place, and return, the scores of groups.

        position_BG: of the token that is drawn from each row. drafts_BK: the tokens between those rows; needed by
        penalties where G > 1. allowed_BGV: bool; False may not be drawn.
        """
        if self.bias_BV is not None:
            scores_BGV += self.bias_BV.to(scores_BGV.dtype).unsqueeze(1)
        if self.generated_BV is not None:
            self._penalise(scores_BGV, drafts_BK)
        if self.ends_BV is not None and self.banned_before is not None:
            is_early = position_BG < self.banned_before.unsqueeze(1)
            scores_BGV.masked_fill_(is_early.unsqueeze(2) & self.ends_BV.unsqueeze(1), NEG_INF)
        if allowed_BGV is not None:
            scores_BGV.masked_fill_(~allowed_BGV, NEG_INF)
        return scores_BGV

    def _penalise(self, scores_BGV: Tensor, drafts_BK: Tensor | None) -> None:
        assert self.generated_BV is not None
        assert self.in_prompt_BV is not None
        assert self.penalties is not None
        counts_BV, group = self.generated_BV.clone(), scores_BGV.shape[1]
        repetition, frequency, presence = self.penalties.to(scores_BGV.dtype).unsqueeze(2).unbind(1)
        for j in range(group):
            scores = scores_BGV[:, j]
            lowered = torch.where(scores > 0, scores / repetition, scores * repetition)
            generated = counts_BV > 0
            scores = torch.where(self.in_prompt_BV | generated, lowered, scores)
            scores = scores - counts_BV.to(scores.dtype) * frequency
            scores_BGV[:, j] = scores - generated.to(scores.dtype) * presence
            if j + 1 < group:
                assert drafts_BK is not None, "penalties inside a group need its drafts"
                draft = drafts_BK[:, j : j + 1]
                counts_BV.scatter_add_(1, draft, torch.ones_like(draft, dtype=counts_BV.dtype))


class EditTables:
    """Edits of every row of a row table; 10 bytes per row and token of the vocabulary."""

    def __init__(self, n_rows: int, vocab_size: int, device: torch.device) -> None:
        def table(dtype: torch.dtype) -> Tensor:
            return torch.zeros(n_rows, vocab_size, dtype=dtype, device=device)

        self.bias_RV = table(torch.float32)
        self.generated_RV = table(torch.int32)
        self.in_prompt_RV = table(torch.bool)
        self.ends_RV = table(torch.bool)
        self._no_penalties = torch.tensor(NO_PENALTIES, dtype=torch.float64, device=device)
        self.penalties = self._no_penalties.repeat(n_rows, 1)
        self.banned_before = torch.zeros(n_rows, dtype=torch.int64, device=device)

    def buffers(self) -> dict[str, Tensor]:
        """The tables by name."""
        return {
            "bias": self.bias_RV,
            "generated": self.generated_RV,
            "in_prompt": self.in_prompt_RV,
            "ends": self.ends_RV,
            "penalties": self.penalties,
            "banned_before": self.banned_before,
        }

    def put(
        self,
        row: int,
        params: SamplingParams,
        end_ids: Sequence[int],
        banned_before: int,
        counts: TokenCounts | None,
    ) -> None:
        """Overwrite one row with a request's edits. counts: for requests with penalties."""
        device = self.bias_RV.device
        self.bias_RV[row].zero_()
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=device)
            values = torch.tensor(list(params.logit_bias.values()), device=device)
            self.bias_RV[row].index_copy_(0, ids, values.float())
        self.ends_RV[row].zero_()
        if end_ids and params.min_tokens > 0:
            self.ends_RV[row].index_fill_(0, torch.tensor(list(end_ids), device=device), True)
        self.banned_before[row].fill_(banned_before)
        penalties = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        if penalties == NO_PENALTIES:
            self.penalties[row] = self._no_penalties
        else:
            self.penalties[row] = uploaded(torch.tensor(penalties, dtype=torch.float64), device)
        if counts is not None:
            self.generated_RV[row] = counts.generated_V
            self.in_prompt_RV[row] = counts.in_prompt_V

    def select(self, rows_B: Tensor, *, bias: bool, ban: bool, counts: bool) -> Edits:
        """The rows of a batch, as far as its flavour has use for them."""

        def rows(table: Tensor, is_used: bool) -> Tensor | None:
            return table.index_select(0, rows_B) if is_used else None

        return Edits(
            bias_BV=rows(self.bias_RV, bias),
            generated_BV=rows(self.generated_RV, counts),
            in_prompt_BV=rows(self.in_prompt_RV, counts),
            penalties=rows(self.penalties, counts),
            ends_BV=rows(self.ends_RV, ban),
            banned_before=rows(self.banned_before, ban),
        )

    def count(self, rows_B: Tensor, emitted_BG: Tensor, is_emitted_BG: Tensor) -> None:
        """Add the tokens a step emitted."""
        rows_BG = rows_B.unsqueeze(1).expand_as(emitted_BG)
        ones = is_emitted_BG.to(self.generated_RV.dtype)
        self.generated_RV.index_put_((rows_BG, emitted_BG), ones, accumulate=True)


def mask_words(vocab_size: int) -> int:
    """W: int32 words of one mask."""
    return -(-vocab_size // WORD)


def unpack_mask(words: Tensor, vocab_size: int) -> Tensor:
    """Bits [..., W] int32, lowest first, to bool [..., V]."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=words.device)
    bits = (words.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2)[..., :vocab_size] != 0
