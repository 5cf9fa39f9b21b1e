"""Tokens drawn from scores, one program per row: temperature, top_k, top_p, min_p and the draw, without a sort.

Rules: `k3.sampling.Recipe.draw`. What stays after top_k and top_p is everything above an edge, and the first few of what
equals it. The edge is found by bisection over scores as ordered numbers, counting tokens for top_k and adding weights for
top_p. Where few tokens near the best are enough, which is nearly always, they are copied aside in one pass and only they
are looked at from then on; otherwise the whole row is, until few tokens are left that the edge may be. Weights are float32, relative to the best, their sums float64 in a
fixed order, so a row's token does not depend on what is drawn beside it.

Letters: T = B * G rows of scores, B requests, G group tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.triton.best import NOTHING, index_of, ordered, ranked, value_of

BLOCK = 1 << 12  # tokens looked at together, at most; as many are copied aside at most
WARPS = 16
SEGMENTS = tl.constexpr(16)
LOG2_E = tl.constexpr(1.4426950408889634)
NEAR, FAR = tl.constexpr(6.0), tl.constexpr(18.0)  # below the best, in e-folds: is that enough?


@triton.jit
def _uniform(seed, sample, position):
    """`k3.sampling.uniform` for drawing from the target: float64 in [0, 1)."""
    zero = tl.zeros([], tl.uint32)
    high, low, _, _ = tl.philox(
        seed, position.to(tl.uint32), (position >> 32).to(tl.uint32), sample.to(tl.uint32), zero
    )
    return ((high >> 6).to(tl.float64) * (1 << 26) + (low >> 6).to(tl.float64)) * 2.0**-52


@triton.jit
def _weights(x, peak, rate):
    """exp(rate (x - peak)) in base 2."""
    return tl.exp2((x - peak) * rate)


@triton.jit
def _chunk(source, start, n, BLOCK: tl.constexpr):
    """Scores from `start` on, float32, and which of them there are."""
    at = start + tl.arange(0, BLOCK)
    there = at < n
    return tl.load(source + at, mask=there, other=float("-inf")).to(tl.float32), there


@triton.jit
def _few(values, BLOCK: tl.constexpr):
    """Sums of neighbours, which one thread holds."""
    few: tl.constexpr = 8 if BLOCK >= 256 else 1
    return tl.sum(tl.reshape(values, [BLOCK // few, few]), 1)


@triton.jit
def _zeros(dtype: tl.constexpr, BLOCK: tl.constexpr):
    """What sums of `_few` are added to."""
    return tl.zeros([BLOCK // 8 if BLOCK >= 256 else BLOCK], dtype)


@triton.jit
def _best(source, n, BLOCK: tl.constexpr):
    """Id of the first of the best."""
    best = tl.full([BLOCK], NOTHING, tl.int64)
    for start in range(0, n, BLOCK):
        x, there = _chunk(source, start, n, BLOCK)
        number = ranked(x, start + tl.arange(0, BLOCK))
        best = tl.maximum(best, tl.where(there, number, NOTHING))
    return index_of(tl.max(best, 0)).to(tl.int32)


@triton.jit
def _peak(source, n, BLOCK: tl.constexpr):
    """The best score."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, n, BLOCK):
        x, _ = _chunk(source, start, n, BLOCK)
        best = tl.maximum(best, x)
    return tl.max(best, 0)


@triton.jit
def _at_least(source, n, edge, peak, rate, BLOCK: tl.constexpr):
    """How many scores are `edge` or more, given as ordered number, and what they weigh."""
    least = value_of(edge.to(tl.int32))
    count, weight = _zeros(tl.int32, BLOCK), _zeros(tl.float64, BLOCK)
    for start in range(0, n, BLOCK):
        x, there = _chunk(source, start, n, BLOCK)
        taken = there & (x >= least)
        count += _few(taken.to(tl.int32), BLOCK)
        weight += _few(tl.where(taken, _weights(x, peak, rate), 0.0), BLOCK).to(tl.float64)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _copy_aside(source, n, least, limit, to, ids, BLOCK: tl.constexpr):
    """Scores that are neither below `least` nor `limit` or more, and their ids, in order of ids."""
    first = tl.zeros([], tl.int32)
    x, there = _chunk(source, 0, n, BLOCK)
    for start in range(0, n, BLOCK):
        next_x, next_there = _chunk(source, start + BLOCK, n, BLOCK)
        taken = (there & ~(x < least) & ~(x >= limit)).to(tl.int32)
        at = first + tl.cumsum(taken, 0) - 1
        tl.store(to + at, x, mask=taken > 0)
        tl.store(ids + at, start + tl.arange(0, BLOCK), mask=taken > 0)
        first += tl.sum(taken, 0)
        x, there = next_x, next_there
    tl.debug_barrier()  # the copies are there


@triton.jit
def _bisected(source, n, low, high, goal, peak, rate, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest number in low .. high that at least `goal` tokens, or weight, reach; `low` if none."""
    while low < high:
        middle = low + (high - low + 1) // 2
        count, weight = _at_least(source, n, middle, peak, rate, BLOCK)
        reached = weight if BY_WEIGHT else count.to(tl.float64)
        if reached >= goal:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _closed_in(
    row,
    n,
    low,
    high,
    goal,
    aside,
    ids,
    peak,
    rate,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_bisected` for long rows: once few tokens are left in low .. high, only they are looked at."""
    n_low, n_above, above = n, tl.zeros([], tl.int32), tl.zeros([], tl.float64)
    while (low < high) & (n_low - n_above > BLOCK):
        middle = low + (high - low + 1) // 2
        count, weight = _at_least(row, n, middle, peak, rate, BLOCK)
        reached = weight if BY_WEIGHT else count.to(tl.float64)
        if reached >= goal:
            low, n_low = middle, count
        else:
            high, n_above, above = middle - 1, count, reached
    if low < high:
        least, limit = value_of(low.to(tl.int32)), value_of((high + 1).to(tl.int32))
        _copy_aside(row, n, least, limit, aside, ids, BLOCK)
        left = n_low - n_above
        low = _bisected(aside, left, low, high, goal - above, peak, rate, BY_WEIGHT, BLOCK)
        tl.debug_barrier()  # the place may be used again
    return low


@triton.jit
def _edge(
    source,
    n,
    low,
    top_k,
    top_p,
    goal,
    aside,
    ids,
    peak,
    rate,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The lowest score that stays, as ordered number, and how many of those that equal it. goal: weight for top_p."""
    high = ordered(peak).to(tl.int64)
    edge, places = low, n.to(tl.int64)
    if top_k > 0:
        aim = top_k.to(tl.float64)
        if FEW:
            edge = _bisected(source, n, low, high, aim, peak, rate, False, BLOCK)
        else:
            edge = _closed_in(source, n, low, high, aim, aside, ids, peak, rate, False, BLOCK)
        _, weight = _at_least(source, n, edge, peak, rate, BLOCK)
        goal = top_p * weight
    if top_p < 1.0:
        if FEW:
            edge = _bisected(source, n, edge, high, goal, peak, rate, True, BLOCK)
        else:
            edge = _closed_in(source, n, edge, high, goal, aside, ids, peak, rate, True, BLOCK)
        _, above = _at_least(source, n, edge + 1, peak, rate, BLOCK)
        one = _weights(value_of(edge.to(tl.int32)), peak, rate).to(tl.float64)
        share = tl.ceil((goal - above) / one)
        places = tl.where((share > 1.0) & (share <= n), share, 1.0).to(tl.int64)
    return edge, places


@triton.jit
def _staying(x, there, edge, places, n_equal, min_p, peak, rate, LIMITED: tl.constexpr):
    """Weights of a chunk, 0 where a token does not stay; and how many equalled the edge up to here."""
    weight = _weights(x, peak, rate)
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

    Sums of long segments say in which one it lies, so that only one is looked at block by block.
    """
    length = (n + SEGMENTS * BLOCK - 1) // (SEGMENTS * BLOCK) * BLOCK
    segment, none = tl.arange(0, SEGMENTS), tl.zeros([SEGMENTS], tl.int32)
    before_S, equal_S = none.to(tl.float64), none
    total, n_equal = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for first in range(0, n, length):
        is_this = segment == first // length
        before_S, equal_S = (
            tl.where(is_this, total, before_S),
            tl.where(is_this, n_equal, equal_S),
        )
        sums, end = _zeros(tl.float64, BLOCK), tl.minimum(first + length, n)
        for start in range(first, end, BLOCK):
            x, there = _chunk(source, start, end, BLOCK)
            w, n_equal = _staying(x, there, edge, places, n_equal, min_p, peak, rate, LIMITED)
            sums += _few(w, BLOCK).to(tl.float64)
        total += tl.sum(sums, 0)
    aim = u * total
    # The last segment that begins at or before the aim, of those with a weight: each begins where the one before ends.
    at = tl.sum((before_S <= aim).to(tl.int32) * (segment * length < n).to(tl.int32), 0) - 1
    at = tl.maximum(at, 0)  # sums that are no numbers
    here = segment == at
    before, n_equal = (
        tl.sum(tl.where(here, before_S, 0.0), 0),
        tl.sum(tl.where(here, equal_S, 0), 0),
    )
    start, end = at * length, tl.minimum(at * length + length, n)
    found, lane = tl.full([], -1, tl.int32), tl.arange(0, BLOCK)
    last = found  # with a weight: where rounding leaves nobody past the aim
    while (start < end) & (found < 0):
        x, there = _chunk(source, start, end, BLOCK)
        w, n_equal = _staying(x, there, edge, places, n_equal, min_p, peak, rate, LIMITED)
        share = before + tl.cumsum(w.to(tl.float64), 0)
        inside = tl.min(tl.where((share > aim) & (w > 0.0), lane, BLOCK), 0)
        found = tl.where(inside < BLOCK, start + inside, -1)
        heavy = tl.max(tl.where(w > 0.0, lane, -1), 0)
        last = tl.where(heavy >= 0, start + heavy, last)
        before += tl.sum(_few(w, BLOCK).to(tl.float64), 0)
        start += BLOCK
    return tl.where(found < 0, last, found)


@triton.jit
def _enough(source, n, top_k, top_p, peak, rate, BLOCK: tl.constexpr):
    """What top_p has to reach of the whole row; a score from which on there is enough, -inf if unknown, and how many."""
    total, near_w, far_w = (
        _zeros(tl.float64, BLOCK),
        _zeros(tl.float64, BLOCK),
        _zeros(tl.float64, BLOCK),
    )
    near_n, far_n = _zeros(tl.int32, BLOCK), _zeros(tl.int32, BLOCK)
    nats = 1.0 / rate * LOG2_E
    near, far = peak - nats * NEAR, peak - nats * FAR
    for start in range(0, n, BLOCK):
        x, there = _chunk(source, start, n, BLOCK)
        w = tl.where(there, _weights(x, peak, rate), 0.0)
        is_near, is_far = there & ~(x < near), there & ~(x < far)
        total += _few(w, BLOCK).to(tl.float64)
        near_w += _few(tl.where(is_near, w, 0.0), BLOCK).to(tl.float64)
        far_w += _few(tl.where(is_far, w, 0.0), BLOCK).to(tl.float64)
        near_n += _few(is_near.to(tl.int32), BLOCK)
        far_n += _few(is_far.to(tl.int32), BLOCK)
    goal = top_p * tl.sum(total, 0)
    n_near, n_far = tl.sum(near_n, 0), tl.sum(far_n, 0)
    has_near = tl.where(top_k > 0, n_near >= top_k, tl.sum(near_w, 0) >= goal)
    has_far = tl.where(top_k > 0, n_far >= top_k, tl.sum(far_w, 0) >= goal)
    cut = tl.where(has_near, near, tl.where(has_far, far, float("-inf")))
    return goal, cut, tl.where(has_near, n_near, tl.where(has_far, n_far, n))


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
        goal, cut, n = _enough(row, vocabulary, top_k, top_p, peak, rate, BLOCK)
        low = ordered(cut).to(tl.int64)
        if n <= BLOCK:
            _copy_aside(row, vocabulary, cut, float("inf"), aside, ids, BLOCK)
            edge, places = _edge(
                aside, n, low, top_k, top_p, goal, aside, ids, peak, rate, True, BLOCK
            )
            at = _drawn(aside, n, edge, places, min_p, u, peak, rate, True, BLOCK)
            token = tl.load(ids + at, mask=at >= 0, other=-1)
        else:
            edge, places = _edge(
                row, vocabulary, low, top_k, top_p, goal, aside, ids, peak, rate, False, BLOCK
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
