"""Which drafts of a verify group are kept, and what the token after them is drawn from.

`match` accepts drafts while they equal what was drawn at their position, so tokens do not depend on drafts. `token` and
`block` compare the target's distributions p with the q the drafts were drawn from: tokens then depend on drafts, their
law does not, and more of them are kept. All of it batched, without a look at any value.

Letters: B requests, G = K + 1 group tokens, K drafts, V vocabulary. Row j of p follows j drafts. Golden: dspark/reject.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TINY = 1e-8  # probability mass that counts as none


class Verdict(NamedTuple):
    """Drafts accepted [B], and what the token after them is drawn from, [B, V]."""

    accepted_B: Tensor
    final_BV: Tensor


def accept(drawn_BG: Tensor, drafts_BK: Tensor, draft_len_B: Tensor) -> Tensor:
    """The `match` rule: drafts are accepted as long as they equal what was drawn at their position.

    Each row of a group is drawn with the random number of its own position, so tokens do not depend on the drafts.
    draft_len_B: real drafts of each request, the others are padding. Returns accepted [B] int64 in 0..k.
    """
    k = drafts_BK.shape[1]
    if k == 0:
        return torch.zeros_like(draft_len_B)
    real = torch.arange(k, device=drafts_BK.device) < draft_len_B[:, None]
    same = (drawn_BG[:, :k] == drafts_BK) & real
    return same.long().cumprod(1).sum(1)


def accept_by_token(
    p_BGV: Tensor, q_BKV: Tensor, drafts_BK: Tensor, draft_len_B: Tensor, u_BK: Tensor
) -> Verdict:
    """Draft i is accepted with probability min(1, p / q), the first one that is not ends it; lossless.

    p_BGV: filtered, normalised target distributions. q_BKV: what the drafts were drawn from. u_BK: uniforms.
    """
    is_real = torch.arange(drafts_BK.shape[1], device=p_BGV.device) < draft_len_B[:, None]
    is_through = (u_BK < _ratio(p_BGV, q_BKV, drafts_BK)) & is_real
    accepted_B = is_through.long().cumprod(1).sum(1)
    ones_B = torch.ones_like(u_BK[:, 0])
    return Verdict(accepted_B, _final(p_BGV, q_BKV, ones_B, accepted_B, draft_len_B))


def accept_by_block(
    p_BGV: Tensor, q_BKV: Tensor, drafts_BK: Tensor, draft_len_B: Tensor, u_BK: Tensor
) -> Verdict:
    """The longest prefix that a test of the joint probability lets through; lossless and never shorter in the mean.

    r_i = min(1, r_{i-1} p / q), Z_i = mass of max(r_i p - q, 0), h_i = Z_i / (Z_i + 1 - r_i), h_n = r_n for the last of
    n drafts; the largest i with u_i < h_i counts, whatever came before it. Arguments as in `accept_by_token`.
    """
    k = drafts_BK.shape[1]
    ratio_BK = _ratio(p_BGV, q_BKV, drafts_BK)
    r_B, accepted_B = torch.ones_like(ratio_BK[:, 0]), torch.zeros_like(draft_len_B)
    best_B = r_B  # r of the longest prefix so far
    for i in range(1, k + 1):
        r_B = (r_B * ratio_BK[:, i - 1]).clamp(max=1.0)
        u_B, is_last = u_BK[:, i - 1], draft_len_B == i
        is_through = is_last & (u_B < r_B)
        if i < k:
            mass_B = (r_B[:, None] * p_BGV[:, i] - q_BKV[:, i]).clamp(min=0).sum(-1)
            is_inside = (i < draft_len_B) & (u_B * (mass_B + 1 - r_B) < mass_B)
            is_through = is_through | is_inside
        accepted_B = torch.where(is_through, i, accepted_B)
        best_B = torch.where(is_through, r_B, best_B)
    return Verdict(accepted_B, _final(p_BGV, q_BKV, best_B, accepted_B, draft_len_B))


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Verdict]
RULES: dict[str, Rule] = {"token": accept_by_token, "block": accept_by_block}
NAMES = ("match", *RULES)


def _ratio(p_BGV: Tensor, q_BKV: Tensor, drafts_BK: Tensor) -> Tensor:
    """p / q of every draft, [B, K]."""
    ids = drafts_BK.unsqueeze(2)
    p = p_BGV[:, : ids.shape[1]].gather(2, ids).squeeze(2)
    return p / q_BKV.gather(2, ids).squeeze(2).clamp(min=TINY)


def _final(
    p_BGV: Tensor, q_BKV: Tensor, r_B: Tensor, accepted_B: Tensor, draft_len_B: Tensor
) -> Tensor:
    """What is left of r p without q after the accepted drafts; p itself where all were, or where nothing is left."""

    def row(x: Tensor, index_B: Tensor) -> Tensor:
        return x.gather(1, index_B.view(-1, 1, 1).expand(-1, 1, x.shape[2])).squeeze(1)

    p_BV = row(p_BGV, accepted_B)
    q_BV = row(q_BKV, accepted_B.clamp(max=q_BKV.shape[1] - 1))
    rest_BV = (r_B[:, None] * p_BV - q_BV).clamp(min=0)
    mass_B1 = rest_BV.sum(-1, keepdim=True)
    is_whole = (accepted_B == draft_len_B)[:, None] | (mass_B1 <= TINY)
    return torch.where(is_whole, p_BV, rest_BV / mass_B1.clamp(min=TINY))
