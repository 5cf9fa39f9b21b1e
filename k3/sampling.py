"""From logits to tokens: filters, the counter-based generator, the acceptance rule, log probabilities.

A token is a function of (logits row, parameters, tokens seen, absolute position, seed, sample index) and of nothing
else: there is no generator state, so prefill's first token and decode's later ones continue one sequence, and batch
composition, speculation or another instance change nothing. The position of a token is its index in prompt + output
(the first output token of an n-token prompt has position n).

Order: logit bias, penalties, min_tokens ban, temperature, top_k, top_p, min_p, draw. Greedy is the exact argmax, lowest
id on ties. Log probabilities are the raw log-softmax of the logits, before all of this.

Letters: T rows of logits (B requests x G tokens of a verify group, request major), V vocabulary, N touched entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from k3.types import LogprobParams, SamplingParams, TokenEvent

NEG_INF = float("-inf")
TINY = 1e-8  # probability mass that counts as none


class Purpose(IntEnum):
    """What a random number is for; numbers of different purposes are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


# ------------------------------------------------------------------ generator

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four 32-bit words per counter.

    counter: four int64 tensors holding 32-bit words; key: two. Returns four int64 tensors of 32-bit words.
    A 32 x 32 bit product wraps in int64; low and high word are exact all the same, on every device.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: Tensor, sample_index: Tensor, position: Tensor, purpose: Purpose) -> Tensor:
    """One float64 in [0, 1), 52 bits, per element; all arguments int64 of one shape."""
    counter = (position & _MASK, (position >> 32) & _MASK, sample_index & _MASK)
    key = (seed & _MASK, (seed >> 32) & _MASK)
    high, low, _, _ = philox((*counter, torch.full_like(position, int(purpose))), key)
    return ((high >> 6) * (1 << 26) + (low >> 6)).double() * 2.0**-52


# ------------------------------------------------------------------ requests


@dataclass(frozen=True, slots=True)
class RowSampling:
    """What stays constant about the drawing of one request.

    end_ids: banned while fewer than `params.min_tokens` output tokens exist.
    output_start: position of the first output token.
    """

    params: SamplingParams
    end_ids: tuple[int, ...] = ()
    logprobs: LogprobParams = field(default_factory=LogprobParams)
    output_start: int = 0


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
        self.generated = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        if prompt_ids:
            self.in_prompt[torch.tensor(list(prompt_ids), device=device)] = True
        if output_ids:
            self.add(torch.tensor(list(output_ids), device=device))

    def add(self, token_ids: Tensor) -> None:
        """Count generated tokens, int64 of any length."""
        ones = torch.ones_like(token_ids, dtype=torch.int32)
        self.generated.index_add_(0, token_ids, ones)

    def penalise(self, scores_V: Tensor, params: SamplingParams) -> None:
        """Apply the three penalties in place."""
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            lowered = torch.where(scores_V > 0, scores_V / factor, scores_V * factor)
            seen = self.in_prompt | (self.generated > 0)
            scores_V.copy_(torch.where(seen, lowered, scores_V))
        counts = self.generated.to(scores_V.dtype)
        scores_V.sub_(counts * params.frequency_penalty)
        scores_V.sub_((counts > 0).to(scores_V.dtype) * params.presence_penalty)


# ------------------------------------------------------------------ drawing


class Recipe:
    """How the rows of one batch composition are drawn; built once and used for every step of it.

    Everything that needs a look at each request happens here, so that a step of greedy requests is one argmax.
    """

    def __init__(
        self, rows: Sequence[RowSampling], *, group: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        self.rows = tuple(rows)
        self.group = group
        self._device = device
        params = [row.params for row in rows for _ in range(group)]
        sampled = [t for t, p in enumerate(params) if not p.is_greedy]
        self._filters = _Filters([params[t] for t in sampled], device) if sampled else None
        self._sampled = self._ids(sampled)
        self._all_sampled = len(sampled) == len(params)
        biased = [(t, i, b) for t, p in enumerate(params) for i, b in p.logit_bias.items()]
        self._bias = self._entries(biased)
        banned = [
            (b * group + g, i, row.output_start + row.params.min_tokens)
            for b, row in enumerate(rows)
            if row.params.min_tokens > 0
            for i in row.end_ids
            for g in range(group)
        ]
        self._ban = self._entries(banned)
        self._counted = [b for b, row in enumerate(rows) if row.params.needs_counts]
        self._edits = bool(biased or banned or self._counted)
        self.logprob_rows = tuple(b for b, row in enumerate(rows) if row.logprobs.enabled)

    def draw(
        self, logits_TV: Tensor, positions_T: Tensor, counts: Sequence[TokenCounts | None] = ()
    ) -> Tensor:
        """One token per row of logits, independent of all others.

        positions_T: int64, position of the token to draw. counts: per request, needed where penalties are set; they
        do not see tokens of the same verify group, so such requests must not be given drafts.
        Returns int64 [T].
        """
        wide = logits_TV.dtype in (torch.float32, torch.float64)
        scores = logits_TV if wide else logits_TV.float()
        if self._edits:
            scores = self._edited(scores.clone() if wide else scores, positions_T, counts)
        if self._filters is None:
            return scores.argmax(-1)
        if self._all_sampled:
            return self._filters.draw(scores, positions_T)
        tokens = scores.argmax(-1)
        chosen = self._sampled
        tokens[chosen] = self._filters.draw(scores[chosen], positions_T[chosen])
        return tokens

    def _edited(
        self, scores: Tensor, positions_T: Tensor, counts: Sequence[TokenCounts | None]
    ) -> Tensor:
        if self._bias is not None:
            t, i, bias = self._bias
            scores.index_put_((t, i), bias.to(scores.dtype), accumulate=True)
        for b in self._counted:
            seen = counts[b]
            if seen is None:
                raise ValueError(f"request {b} of the batch has penalties but no token counts")
            for t in range(b * self.group, (b + 1) * self.group):
                seen.penalise(scores[t], self.rows[b].params)
        if self._ban is not None:
            t, i, until = self._ban
            ban = torch.where(positions_T[t] < until, NEG_INF, 0.0)
            scores.index_put_((t, i), ban.to(scores.dtype), accumulate=True)
        return scores

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _entries(
        self, entries: Sequence[tuple[int, int, float]]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if not entries:
            return None
        rows, ids, values = zip(*entries, strict=True)
        third = torch.tensor(values, dtype=torch.float64, device=self._device)
        return self._ids(rows), self._ids(ids), third


class _Filters:
    """Temperature, top_k, top_p, min_p and the draw for rows that are not greedy."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device | str) -> None:
        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self._temperature = column([p.temperature for p in params], torch.float64)[:, None]
        self._top_k = column([max(p.top_k, 0) for p in params], torch.int64)[:, None]
        self._top_p = column([p.top_p for p in params], torch.float64)[:, None]
        self._min_p = column([p.min_p for p in params], torch.float64)[:, None]
        self._seed = column([p.seed for p in params], torch.int64)
        self._sample = column([p.sample_index for p in params], torch.int64)
        self._has_k = any(p.top_k > 0 for p in params)
        self._has_p = any(p.top_p < 1.0 for p in params)
        self._has_min = any(p.min_p > 0.0 for p in params)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Filtered target distribution, float64, not renormalised after min_p."""
        scaled = scores.double() / self._temperature
        if self._has_k or self._has_p:
            scaled = self._nucleus(scaled)
        probs = scaled.softmax(-1)
        if self._has_min:
            floor = self._min_p * probs.amax(-1, keepdim=True)
            probs = torch.where(probs < floor, 0.0, probs)
        return probs

    def draw(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Inverse of the cumulative distribution in order of ids at this position's one uniform number."""
        cdf = self.probabilities(scores).cumsum(-1)
        u = uniform(self._seed, self._sample, positions, Purpose.TARGET) * cdf[:, -1]
        return torch.searchsorted(cdf, u[:, None], right=True)[:, 0].clamp_(max=cdf.shape[1] - 1)

    def _nucleus(self, scaled: Tensor) -> Tensor:
        """top_k keeps values >= the k-th largest; top_p keeps tokens whose preceding mass is below top_p.

        Order of equal values: lower ids first.
        """
        ordered = _descending(scaled)
        if self._has_k:
            v = scaled.shape[1]
            last = torch.where(self._top_k == 0, v, self._top_k).clamp(max=v) - 1
            kth = ordered.gather(1, last)
            scaled = torch.where(scaled < kth, NEG_INF, scaled)
            ordered = torch.where(ordered < kth, NEG_INF, ordered)
        if self._has_p:
            probs = ordered.softmax(-1)
            before = probs.cumsum(-1) - probs
            n_kept = ((before < self._top_p) | (self._top_p >= 1.0)).sum(-1, keepdim=True)
            edge = ordered.gather(1, n_kept - 1)
            above, level = scaled > edge, scaled == edge
            room = n_kept - above.sum(-1, keepdim=True)
            scaled = torch.where(above | (level & (level.cumsum(-1) <= room)), scaled, NEG_INF)
        return scaled


def _descending(values: Tensor) -> Tensor:
    """Each row sorted, largest first. numpy sorts values alone, about 15 times faster than torch on CPU."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values


def accept(drawn_BG: Tensor, drafts_BK: Tensor, draft_len_B: Tensor) -> Tensor:
    """The `match` rule: drafts are accepted as long as they equal what was drawn at their position.

    Each row of a group is drawn with the random number of its own position, so tokens do not depend on the drafts.
    draft_len_B: real drafts of each request, the others are padding. Returns n_accepted [B] int64 in 0..k.
    """
    k = drafts_BK.shape[1]
    if k == 0:
        return torch.zeros_like(draft_len_B)
    real = torch.arange(k, device=drafts_BK.device) < draft_len_B[:, None]
    same = (drawn_BG[:, :k] == drafts_BK) & real
    return same.long().cumprod(1).sum(1)


class Verdict(NamedTuple):
    """Drafts accepted, and what the token after them is drawn from, [V]."""

    n_accepted: int
    final_V: Tensor


def accept_by_token(p_GV: Tensor, q_KV: Tensor, drafts_K: Tensor, u_K: Tensor) -> Verdict:
    """Draft i is accepted with probability min(1, p / q), the first one that is not ends it; lossless.

    p_GV: filtered target distributions of a group, G = K + 1. q_KV: what the drafts were drawn from. u_K: uniforms.
    Golden: dspark/reject.
    """
    for i, draft in enumerate(drafts_K.tolist()):
        if u_K[i] >= p_GV[i, draft] / q_KV[i, draft].clamp(min=TINY):
            return Verdict(i, _residual(p_GV[i], q_KV[i]))
    return Verdict(len(drafts_K), p_GV[len(drafts_K)])


def accept_by_block(p_GV: Tensor, q_KV: Tensor, drafts_K: Tensor, u_K: Tensor) -> Verdict:
    """The longest prefix that a test of the joint probability lets through; lossless and never shorter in the mean.

    r_i = min(1, r_{i-1} p / q), Z_i = mass of max(r_i p - q, 0), h_i = Z_i / (Z_i + 1 - r_i), h_K = r_K; the largest i
    with u_i <= h_i counts, whatever came before it. Arguments as in `accept_by_token`.
    """
    k, r = len(drafts_K), torch.ones((), dtype=p_GV.dtype)
    best = Verdict(0, _residual(p_GV[0], q_KV[0]) if k else p_GV[0])
    for i, draft in enumerate(drafts_K.tolist(), start=1):
        r = (r * p_GV[i - 1, draft] / q_KV[i - 1, draft].clamp(min=TINY)).clamp(max=1.0)
        if i == k:
            if u_K[i - 1] <= r:
                best = Verdict(k, p_GV[k])
            continue
        mass = (r * p_GV[i] - q_KV[i]).clamp(min=0).sum()
        if u_K[i - 1] * (mass + 1 - r) <= mass and r > 0:
            best = Verdict(i, _residual(r * p_GV[i], q_KV[i], p_GV[i]))
    return best


def _residual(p_V: Tensor, q_V: Tensor, otherwise_V: Tensor | None = None) -> Tensor:
    """What is left of p without q, normalised; p itself (or `otherwise_V`) when that is nothing."""
    rest = (p_V - q_V).clamp(min=0)
    mass = rest.sum()
    if mass <= TINY:
        return p_V if otherwise_V is None else otherwise_V
    return rest / mass


# ------------------------------------------------------------------ log probabilities


def with_logprobs(logits_TV: Tensor, token_ids: Sequence[int], top: int) -> list[TokenEvent]:
    """Tokens with their raw log probabilities and the `top` most likely alternatives, descending."""
    if not token_ids:
        return []
    scores = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    logprobs = scores.log_softmax(-1)
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=logprobs.device)
    chosen = logprobs.gather(1, ids[:, None])[:, 0].tolist()
    if top == 0:
        return [TokenEvent(i, lp) for i, lp in zip(token_ids, chosen, strict=True)]
    best, best_ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    tops = [
        tuple(zip(i, v, strict=True)) for i, v in zip(best_ids.tolist(), best.tolist(), strict=True)
    ]
    return [TokenEvent(i, lp, t) for i, lp, t in zip(token_ids, chosen, tops, strict=True)]


def sample(
    logits_TV: Tensor,
    rows: Sequence[RowSampling],
    positions: Sequence[int],
    counts: Sequence[TokenCounts | None] = (),
) -> list[TokenEvent]:
    """Draw one token per row of logits with its log probabilities where wanted: the whole of it for one step.

    positions: of the tokens to draw. counts: per row, None where `params.needs_counts` is false.
    """
    if not rows:
        return []
    recipe = Recipe(rows, device=logits_TV.device)
    where = torch.tensor(list(positions), dtype=torch.int64, device=logits_TV.device)
    events = [TokenEvent(i) for i in recipe.draw(logits_TV, where, counts).tolist()]
    for b in recipe.logprob_rows:
        top = rows[b].logprobs.top
        events[b] = with_logprobs(logits_TV[b : b + 1], [events[b].id], top)[0]
    return events
