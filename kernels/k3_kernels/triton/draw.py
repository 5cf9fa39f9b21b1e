"""Tokens drawn from scores, one program per row: temperature, top_k, top_p, min_p and the draw, without a sort.

Rules: `k3.sampling.Recipe.draw`; what top_k and top_p leave: `draw_edge.py`. Sums have a fixed order, so a row's token does
not depend on what is drawn beside it.

Letters: T = B * G rows of scores, B requests, G group tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.triton.best import NOTHING, index_of, ordered, ranked
from k3_kernels.triton.draw_edge import (
    LOG2_E,
    chunk,
    copy_aside,
    edge_of,
    enough,
    no_sums,
    summed,
    weights_of,
)

BLOCK = 1 << 12  # tokens looked at together, at most; as many are copied aside at most
WARPS = 16
SPANS = tl.constexpr(16)


@triton.jit
def _uniform(seed, sample, position):
    """`k3.sampling.uniform` for drawing from the target: float64 in [0, 1)."""
    zero = tl.zeros([], tl.uint32)
    high, low, _, _ = tl.philox(
        seed, position.to(tl.uint32), (position >> 32).to(tl.uint32), sample.to(tl.uint32), zero
    )
    return ((high >> 6).to(tl.float64) * (1 << 26) + (low >> 6).to(tl.float64)) * 2.0**-52


@triton.jit
def _best(source, n, BLOCK: tl.constexpr):
    """Id of the first of the best."""
    best = tl.full([BLOCK], NOTHING, tl.int64)
    for start in range(0, n, BLOCK):
        x, there = chunk(source, start, n, BLOCK)
        number = ranked(x, start + tl.arange(0, BLOCK))
        best = tl.maximum(best, tl.where(there, number, NOTHING))
    return index_of(tl.max(best, 0)).to(tl.int32)


@triton.jit
def _peak(source, n, BLOCK: tl.constexpr):
    """The best score."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, n, BLOCK):
        x, _ = chunk(source, start, n, BLOCK)
        best = tl.maximum(best, x)
    return tl.max(best, 0)


@triton.jit
def _staying(x, there, edge, places, n_equal, min_p, peak, rate, LIMITED: tl.constexpr):
    """Weights of a chunk, 0 where a token does not stay; and how many equalled the edge up to here."""
    weight = weights_of(x, peak, rate)
    stays = there & (weight >= min_p)
    if LIMITED:
        number = ordered(x).to(tl.int64)
        equal = there & (number == edge)
        rank = n_equal + tl.cumsum(equal.to(tl.int32), 0)
        stays &= (number > edge) | (equal & (rank <= places))
        n_equal += tl.sum(equal.to(tl.int32), 0)
    return tl.where(stays, weight, 0.0), n_equal


@triton.jit
def _drawn(
    source,
    n,
    edge,
    places,
    min_p,
    u,
    peak,
    rate,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Index of the first token up to which more than the share `u` of what stays lies; -1 if none has a weight.

    Sums of long spans say in which one it lies, so that only one is looked at block by block.
    """
    length = (n + SPANS * BLOCK - 1) // (SPANS * BLOCK) * BLOCK
    span, none = tl.arange(0, SPANS), tl.zeros([SPANS], tl.int32)
    before_S, equal_S = none.to(tl.float64), none
    total, n_equal = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for first in range(0, n, length):
        is_this = span == first // length
        before_S, equal_S = (
            tl.where(is_this, total, before_S),
            tl.where(is_this, n_equal, equal_S),
        )
        here, end = no_sums(tl.float64, BLOCK), tl.minimum(first + length, n)
        for start in range(first, end, BLOCK):
            x, there = chunk(source, start, end, BLOCK)
            w, n_equal = _staying(x, there, edge, places, n_equal, min_p, peak, rate, LIMITED)
            here += summed(w, BLOCK).to(tl.float64)
        total += tl.sum(here, 0)
    aim = u * total
    # The last span that begins at or before the aim, of those with a weight: each begins where the one before ends.
    at = tl.sum((before_S <= aim).to(tl.int32) * (span * length < n).to(tl.int32), 0) - 1
    at = tl.maximum(at, 0)  # sums that are no numbers
    here = span == at
    before, n_equal = (
        tl.sum(tl.where(here, before_S, 0.0), 0),
        tl.sum(tl.where(here, equal_S, 0), 0),
    )
    start, end = at * length, tl.minimum(at * length + length, n)
    found, lane = tl.full([], -1, tl.int32), tl.arange(0, BLOCK)
    last = found  # with a weight: where rounding leaves nobody past the aim
    while (start < end) & (found < 0):
        x, there = chunk(source, start, end, BLOCK)
        w, n_equal = _staying(x, there, edge, places, n_equal, min_p, peak, rate, LIMITED)
        share = before + tl.cumsum(w.to(tl.float64), 0)
        inside = tl.min(tl.where((share > aim) & (w > 0.0), lane, BLOCK), 0)
        found = tl.where(inside < BLOCK, start + inside, -1)
        heavy = tl.max(tl.where(w > 0.0, lane, -1), 0)
        last = tl.where(heavy >= 0, start + heavy, last)
        before += tl.sum(summed(w, BLOCK).to(tl.float64), 0)
        start += BLOCK
    return tl.where(found < 0, last, found)


@triton.jit
def _sampled(
    row,
    vocabulary,
    peak,
    reals,
    whole,
    u,
    aside,
    ids,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token drawn from a row; -1 if no token has a weight."""
    rate = (1.0 / tl.load(reals)).to(tl.float32) * LOG2_E
    top_p, min_p = tl.load(reals + 1), tl.load(reals + 2).to(tl.float32)
    top_k, everything = tl.load(whole + 2), tl.zeros([], tl.int64)
    is_limited = LIMITED and ((top_k > 0) | (top_p < 1.0))
    if is_limited:
        top_k = tl.minimum(top_k, vocabulary)
        goal, cut, n = enough(row, vocabulary, top_k, top_p, peak, rate, BLOCK)
        low = ordered(cut).to(tl.int64)
        if n <= BLOCK:
            copy_aside(row, vocabulary, cut, float("inf"), aside, ids, BLOCK)
            edge, places = edge_of(
                aside, n, low, n, top_k, top_p, goal, aside, ids, peak, rate, True, BLOCK
            )
            at = _drawn(aside, n, edge, places, min_p, u, peak, rate, True, BLOCK)
            token = tl.load(ids + at, mask=at >= 0, other=-1)
        else:
            edge, places = edge_of(
                row, vocabulary, low, n, top_k, top_p, goal, aside, ids, peak, rate, False, BLOCK
            )
            token = _drawn(row, vocabulary, edge, places, min_p, u, peak, rate, True, BLOCK)
    else:
        token = _drawn(row, vocabulary, everything, everything, min_p, u, peak, rate, False, BLOCK)
    return token


@triton.jit
def _draw(
    scores_ptr,
    reals_ptr,
    whole_ptr,
    position_ptr,
    drawn_ptr,
    aside_ptr,
    ids_ptr,
    row_stride,
    vocabulary,
    G: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    b = t // G
    row, reals, whole = scores_ptr + t * row_stride, reals_ptr + b * 3, whole_ptr + b * 4
    token = tl.full([], -1, tl.int32)
    if tl.load(whole + 3) == 0:
        peak = _peak(row, vocabulary, BLOCK)
        if tl.abs(peak) < float("inf"):
            u = _uniform(tl.load(whole), tl.load(whole + 1), tl.load(position_ptr + t))
            aside, ids = aside_ptr + t * BLOCK, ids_ptr + t * BLOCK
            token = _sampled(row, vocabulary, peak, reals, whole, u, aside, ids, LIMITED, BLOCK)
    if token < 0:
        token = _best(row, vocabulary, BLOCK)
    tl.store(drawn_ptr + t, token.to(tl.int64))


def draw(
    scores_BGV: Tensor,
    reals_B3: Tensor,
    whole_B4: Tensor,
    position_BG: Tensor,
    *,
    limited: bool,
) -> Tensor:
    """`draws.Draw`: one launch."""
    n_rows, group, vocabulary = scores_BGV.shape
    assert scores_BGV.dtype != torch.float64, scores_BGV.dtype
    scores_TV = scores_BGV.flatten(0, 1)
    assert scores_TV.stride(1) == 1, f"scores: strides {scores_BGV.stride()}"
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    aside = scores_TV.new_empty(n_rows * group, block if limited else 0, dtype=torch.float32)
    drawn_BG = whole_B4.new_empty(n_rows, group)
    _draw[(n_rows * group,)](
        scores_TV,
        reals_B3.contiguous(),
        whole_B4.contiguous(),
        position_BG.contiguous(),
        drawn_BG,
        aside,
        torch.empty_like(aside, dtype=torch.int32),
        scores_TV.stride(0),
        vocabulary,
        G=group,
        LIMITED=limited,
        BLOCK=block,
        num_warps=WARPS if block == BLOCK else 4,
    )
    return drawn_BG
