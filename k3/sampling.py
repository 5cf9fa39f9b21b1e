"""From logits to tokens: the counter-based generator, filters, the draw, log probabilities.

A token is a function of (logits row, parameters, tokens seen, absolute position, seed, sample index) and of nothing
else: there is no generator state, so prefill's first token and decode's later ones continue one sequence, and batch
composition, speculation or another instance change nothing. The position of a token is its index in prompt + output
(the first output token of an n-token prompt has position n).

Order: edits (`k3/edits.py`: bias, penalties, bans, masks), temperature, top_k, top_p, min_p, draw. Greedy is the exact
argmax, lowest id on ties. Log probabilities are the raw log-softmax of the logits, before all of this. What drawing
needs to know of a request are numbers in two small tensors, so that a step reads them from device tables by row.

Letters: R table rows, B requests, G tokens of a verify group, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import torch
from k3_kernels.draws import Draw
from torch import Tensor

from k3.device import uploaded
from k3.edits import Edits, EditTables, TokenCounts
from k3.types import LogprobParams, SamplingParams, TokenEvent

NEG_INF = float("-inf")
MAX_TOP = 20  # alternatives whose log probabilities a request may ask for


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


def uniform(
    seed: Tensor,
    sample_index: Tensor,
    position: Tensor,
    purpose: Purpose,
    slot: Tensor | None = None,
) -> Tensor:
    """One float64 in [0, 1), 52 bits, per element; all arguments int64 of one shape.

    slot: index of the draft inside its group. A position may be drafted in several groups, and the block rule looks at
    numbers behind the place where it stops; with the slot in the counter each group has its own.
    """
    counter = (position & _MASK, (position >> 32) & _MASK, sample_index & _MASK)
    key = (seed & _MASK, (seed >> 32) & _MASK)
    use = torch.full_like(position, int(purpose))
    if slot is not None:
        use = use + slot * len(Purpose)
    high, low, _, _ = philox((*counter, use), key)
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

    @property
    def banned_before(self) -> int:
        """First position at which the end ids may be drawn."""
        return self.output_start + self.params.min_tokens


@dataclass(frozen=True, slots=True)
class Flavour:
    """Which parts of drawing a batch needs. The parts it has are exact no-ops for requests that do not need them."""

    greedy: bool = False
    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    bias: bool = False
    ban: bool = False
    counts: bool = False
    masks: bool = False
    logprobs: bool = False
    top_logprobs: bool = False

    @classmethod
    def of(cls, rows: Sequence[RowSampling], *, masks: bool = False) -> Flavour:
        """Of these requests together."""
        params = [row.params for row in rows]
        sampled = [p for p in params if not p.is_greedy]
        return cls(
            greedy=len(sampled) < len(params),
            sampled=bool(sampled),
            top_k=any(p.top_k > 0 for p in sampled),
            top_p=any(p.top_p < 1.0 for p in sampled),
            min_p=any(p.min_p > 0.0 for p in sampled),
            bias=any(p.logit_bias for p in params),
            ban=any(row.params.min_tokens > 0 and row.end_ids for row in rows),
            counts=any(p.needs_counts for p in params),
            masks=masks,
            logprobs=any(row.logprobs.enabled for row in rows),
            top_logprobs=any(row.logprobs.enabled and row.logprobs.top for row in rows),
        )

    @property
    def edits(self) -> bool:
        """Whether anything changes the logits before they are drawn from."""
        return self.bias or self.ban or self.counts or self.masks

    @property
    def is_plain(self) -> bool:
        """Whether it is all the same what the logits are, but for which one is the best."""
        return not (self.sampled or self.edits or self.logprobs)


@dataclass(frozen=True, slots=True)
class Params:
    """Numbers of requests, one row each. reals: [B, 3] float64; whole: [B, 4] int64; columns as named below."""

    reals: Tensor
    whole: Tensor

    @classmethod
    def empty(cls, n: int, device: torch.device | str) -> Params:
        """Greedy requests."""
        reals = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64, device=device).repeat(n, 1)
        whole = torch.tensor([[0, 0, 0, 1]], dtype=torch.int64, device=device).repeat(n, 1)
        return cls(reals, whole)

    @classmethod
    def of(cls, rows: Sequence[RowSampling], device: torch.device | str) -> Params:
        """In their order."""
        return cls(*(uploaded(x, torch.device(device)) for x in cls.numbers(rows)))

    @staticmethod
    def numbers(rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor]:
        """`reals` and `whole` of these requests, on the host."""
        params = [row.params for row in rows]
        reals = [(1.0 if p.is_greedy else p.temperature, p.top_p, p.min_p) for p in params]
        whole = [(p.seed, p.sample_index, max(p.top_k, 0), int(p.is_greedy)) for p in params]
        return torch.tensor(reals, dtype=torch.float64), torch.tensor(whole, dtype=torch.int64)

    def put(self, row: int, one: Params) -> None:
        """Overwrite one row."""
        self.reals[row : row + 1] = one.reals
        self.whole[row : row + 1] = one.whole

    def select(self, rows_B: Tensor) -> Params:
        """A copy of some rows."""
        return Params(self.reals.index_select(0, rows_B), self.whole.index_select(0, rows_B))

    @property
    def temperature_B(self) -> Tensor:
        """1 for greedy requests, which do not use it."""
        return self.reals[:, 0]

    @property
    def top_p_B(self) -> Tensor:
        """1: all tokens."""
        return self.reals[:, 1]

    @property
    def min_p_B(self) -> Tensor:
        """0: all tokens."""
        return self.reals[:, 2]

    @property
    def top_k_B(self) -> Tensor:
        """0: all tokens."""
        return self.whole[:, 2]

    @property
    def greedy_B(self) -> Tensor:
        """Bool."""
        return self.whole[:, 3] != 0

    def uniform(
        self, position_BG: Tensor, purpose: Purpose, slot_G: Tensor | None = None
    ) -> Tensor:
        """Numbers [B, G] of these requests at these positions; `slot_G` as in `uniform`."""
        seed, sample = (self.whole[:, i : i + 1].expand_as(position_BG) for i in (0, 1))
        slot_BG = None if slot_G is None else slot_G.expand_as(position_BG)
        return uniform(seed, sample, position_BG, purpose, slot_BG)


# ------------------------------------------------------------------ drawing


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a batch is drawn. edits: needed where `flavour.edits`. by: draws instead of torch."""

    params: Params
    flavour: Flavour
    edits: Edits | None = None
    by: Draw | None = None

    @classmethod
    def of(
        cls,
        rows: Sequence[RowSampling],
        counts: Sequence[TokenCounts | None] = (),
        *,
        device: torch.device | str = "cpu",
        vocab_size: int,
        by: Draw | None = None,
    ) -> Recipe:
        """Of requests that are in no table. counts: needed where penalties are set."""
        flavour = Flavour.of(rows)
        if not flavour.edits:
            return cls(Params.of(rows, device), flavour, by=by)
        tables = EditTables(len(rows), vocab_size, torch.device(device))
        for b, row in enumerate(rows):
            seen = counts[b] if row.params.needs_counts and counts else None
            if row.params.needs_counts and seen is None:
                raise ValueError(f"request {b} of the batch has penalties but no token counts")
            tables.put(b, row.params, row.end_ids, row.banned_before, seen)
        everybody = torch.arange(len(rows), device=device)
        edits = tables.select(everybody, bias=flavour.bias, ban=flavour.ban, counts=flavour.counts)
        return cls(Params.of(rows, device), flavour, edits, by)

    def scores(
        self,
        logits_BGV: Tensor,
        position_BG: Tensor,
        drafts_BK: Tensor | None = None,
        allowed_BGV: Tensor | None = None,
    ) -> Tensor:
        """What is drawn from: logits, with edits at least float32; arguments as in `Edits.apply`."""
        if not self.flavour.edits:
            return logits_BGV
        wide = logits_BGV.dtype in (torch.float32, torch.float64)
        scores = logits_BGV if wide else logits_BGV.float()
        assert self.edits is not None, "this batch edits its logits and got nothing to edit with"
        return self.edits.apply(
            scores.clone() if wide else scores, position_BG, drafts_BK, allowed_BGV
        )

    def draw(self, scores_BGV: Tensor, position_BG: Tensor) -> Tensor:
        """One token [B, G] per row of scores, independent of all others. position_BG: of the token to draw."""
        if not self.flavour.sampled:
            return scores_BGV.argmax(-1)
        if self.by is not None:
            limited = self.flavour.top_k or self.flavour.top_p
            params = self.params
            return self.by(scores_BGV, params.reals, params.whole, position_BG, limited=limited)
        weights = self._filtered(scores_BGV)
        drawn = pick(weights, self.params.uniform(position_BG, Purpose.TARGET))
        if not self.flavour.greedy:
            return drawn
        return torch.where(self.params.greedy_B.unsqueeze(1), scores_BGV.argmax(-1), drawn)

    def probabilities(self, scores_BGV: Tensor) -> Tensor:
        """The distribution `draw` draws from, normalised, float64; one-hot for greedy requests."""
        weights = self._filtered(scores_BGV)
        p = weights / weights.sum(-1, keepdim=True)
        if not self.flavour.greedy:
            return p
        best = one_hot(scores_BGV.argmax(-1), p.shape[-1], p.dtype)
        return torch.where(self.params.greedy_B.view(-1, 1, 1), best, p)

    def _filtered(self, scores_BGV: Tensor) -> Tensor:
        """Weights [B, G, V] after temperature and filters, float64, not renormalised after min_p."""
        params, flavour = self.params, self.flavour
        scaled = scores_BGV.double() / params.temperature_B.view(-1, 1, 1)
        if flavour.top_k or flavour.top_p:
            scaled = self._nucleus(scaled)
        weights = scaled.softmax(-1)
        if flavour.min_p:
            floor = params.min_p_B.view(-1, 1, 1) * weights.amax(-1, keepdim=True)
            weights = torch.where(weights < floor, 0.0, weights)
        return weights

    def _nucleus(self, scaled: Tensor) -> Tensor:
        """top_k keeps values >= the k-th largest; top_p keeps tokens whose preceding mass is below top_p.

        Order of equal values: lower ids first.
        """
        ordered = _descending(scaled)
        if self.flavour.top_k:
            v, top_k = scaled.shape[-1], self.params.top_k_B.view(-1, 1, 1)
            last = torch.where(top_k == 0, v, top_k).clamp(max=v) - 1
            kth = ordered.gather(-1, last.expand(*scaled.shape[:-1], 1))
            scaled = torch.where(scaled < kth, NEG_INF, scaled)
            ordered = torch.where(ordered < kth, NEG_INF, ordered)
        if self.flavour.top_p:
            top_p = self.params.top_p_B.view(-1, 1, 1)
            probs = ordered.softmax(-1)
            before = probs.cumsum(-1) - probs
            n_kept = ((before < top_p) | (top_p >= 1.0)).sum(-1, keepdim=True)
            edge = ordered.gather(-1, n_kept - 1)
            above, level = scaled > edge, scaled == edge
            room = n_kept - above.sum(-1, keepdim=True)
            scaled = torch.where(above | (level & (level.cumsum(-1) <= room)), scaled, NEG_INF)
        return scaled


def pick(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse of the cumulative distribution in order of ids. weights: [..., V], any sum; u: [...] in [0, 1)."""
    cdf = weights.cumsum(-1)
    at = (u * cdf[..., -1]).unsqueeze(-1)
    return torch.searchsorted(cdf, at, right=True).squeeze(-1).clamp_(max=cdf.shape[-1] - 1)


def one_hot(ids: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """[..., V]: 1 at the id."""
    zeros = torch.zeros(*ids.shape, vocab_size, dtype=dtype, device=ids.device)
    return zeros.scatter_(-1, ids.unsqueeze(-1), 1.0)


def _descending(values: Tensor) -> Tensor:
    """Each row sorted, largest first. numpy sorts values alone, about 15 times faster than torch on CPU."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values


# ------------------------------------------------------------------ log probabilities


def raw_logprobs(logits: Tensor) -> Tensor:
    """[..., V] before any edit and filter, at least float32."""
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)


def with_logprobs(logits_TV: Tensor, token_ids: Sequence[int], top: int) -> list[TokenEvent]:
    """Tokens with their raw log probabilities and the `top` most likely alternatives, descending."""
    if not token_ids:
        return []
    logprobs = raw_logprobs(logits_TV)
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
    by: Draw | None = None,
) -> list[TokenEvent]:
    """Draw one token per row of logits with its log probabilities where wanted: the whole of it for one step.

    positions: of the tokens to draw. counts: per row, None where `params.needs_counts` is false. by: as in `Recipe`.
    """
    if not rows:
        return []
    recipe = Recipe.of(rows, counts, device=logits_TV.device, vocab_size=logits_TV.shape[1], by=by)
    where = torch.tensor(list(positions), dtype=torch.int64, device=logits_TV.device)[:, None]
    drawn = recipe.draw(recipe.scores(logits_TV[:, None], where), where)[:, 0].tolist()
    events = [TokenEvent(i) for i in drawn]
    for b, row in enumerate(rows):
        if row.logprobs.enabled:
            events[b] = with_logprobs(logits_TV[b : b + 1], [drawn[b]], row.logprobs.top)[0]
    return events
