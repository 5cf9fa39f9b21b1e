"""Tokens drawn from scores, one program per row: temperature, top_k, top_p, min_p and the draw, without a sort.

Rules: `k3.sampling.Recipe.draw`. What stays after top_k and top_p is everything above an edge, and the first few of what
equals it. The edge is found by bisection over scores as ordered numbers, counting tokens for top_k and adding weights for
top_p. Where few tokens near the best are enough, which is nearly always, they are copied aside in one pass and only they
are looked at from then on; otherwise the whole row is. Weights are float32, relative to the best, their sums float64 in a
fixed order, so a row's token does not depend on what is drawn beside it.

Letters: T = B * G rows of scores, B requests, G group tokens, V vocabulary, S tokens copied aside.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.triton.best import NOTHING, index_of, ordered, ranked, value_of

BLOCK = 1 << 12  # tokens looked at together, at most; as many are copied aside at most
WARPS = 16
LOG2_E = tl.constexpr(1.4426950408889634)
NEAR, FAR = (
    tl.constexpr(6.0),
    tl.constexpr(18.0),
)  # natural logs below the best: tried as what is enough


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
    """exp(rate (x - peak)) in base 2; the best weighs 1 even where it is infinite."""
    is_best = x == peak
    return tl.exp2((tl.where(is_best, 0.0, x) - tl.where(is_best, 0.0, peak)) * rate)


@triton.jit
def _chunk(source, start, n, BLOCK: tl.constexpr):
    """Scores from `start` on, float32, and which of them there are."""
    at = start + tl.arange(0, BLOCK)
    there = at < n
    return tl.load(source + at, mask=there, other=float("-inf")).to(tl.float32), there


@triton.jit
def _best(source, n, BLOCK: tl.constexpr):
    """Id of the first of the best."""
    best = tl.full([BLOCK], NOTHING, tl.int64)
    for start in range(0, n, BLOCK):
        x, there = _chunk(source, start, n, BLOCK)
        number = ranked(x, start + tl.arange(0, BLOCK))
        best = tl.maximum(best, tl.where(there, number, NOTHING))
    return index_of(tl.max(best, 0))


@triton.jit
def _at_least(source, n, edge, peak, rate, BLOCK: tl.constexpr):
    """How many scores are `edge` or more, as ordered numbers, and what they weigh."""
    count, weight = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float64)
    for start in range(0, n, BLOCK):
        x, there = _chunk(source, start, n, BLOCK)
        taken = there & (ordered(x) >= edge)
        count += taken.to(tl.int32)
        weight += tl.where(taken, _weights(x, peak, rate), 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(weight, 0)


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
def _edge(source, n, low, top_k, top_p, goal, peak, rate, BLOCK: tl.constexpr):
    """The lowest score that stays, as ordered number, and how many of those that equal it. goal: weight for top_p."""
    high = ordered(peak).to(tl.int64)
    edge, places = low, n.to(tl.int64)
    if top_k > 0:
        edge = _bisected(source, n, low, high, top_k.to(tl.float64), peak, rate, False, BLOCK)
        _, weight = _at_least(source, n, edge, peak, rate, BLOCK)
        goal = top_p * weight
    if top_p < 1.0:
        edge = _bisected(source, n, edge, high, goal, peak, rate, True, BLOCK)
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
    return tl.where(stays, weight, 0.0).to(tl.float64), n_equal


@triton.jit
def _drawn(
    source, n, edge, places, min_p, u, peak, rate, LIMITED: tl.constexpr, BLOCK: tl.constexpr
):
    """Index of the first token up to which more than the share `u` of what stays lies; -1 if none has a weight."""
    total, n_equal = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for start in range(0, n, BLOCK):
        x, there = _chunk(source, start, n, BLOCK)
        w, n_equal = _staying(x, there, edge, places, n_equal, min_p, peak, rate, LIMITED)
        total += tl.sum(w, 0)
    aim, before, n_equal = u * total, tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    start, found = tl.zeros([], tl.int32), tl.full([], -1, tl.int32)
    lane = tl.arange(0, BLOCK)
    while (start < n) & (found < 0):
        x, there = _chunk(source, start, n, BLOCK)
        w, n_equal = _staying(x, there, edge, places, n_equal, min_p, peak, rate, LIMITED)
        here = tl.sum(w, 0)
        if before + here > aim:
            is_past = (before + tl.cumsum(w, 0) > aim) & (w > 0.0)
            last = tl.max(
                tl.where(w > 0.0, lane, -1), 0
            )  # where rounding leaves nobody past the aim
            found = start + tl.minimum(tl.min(tl.where(is_past, lane, BLOCK), 0), last)
        before += here
        start += BLOCK
    return found


@triton.jit
def _copy_aside(source, n, cut, to, ids, BLOCK: tl.constexpr):
    """Scores from `cut` on and their ids, in order of ids."""
    first = tl.zeros([], tl.int32)
    for start in range(0, n, BLOCK):
        x, there = _chunk(source, start, n, BLOCK)
        taken = (there & (x >= cut)).to(tl.int32)
        at = first + tl.cumsum(taken, 0) - 1
        tl.store(to + at, x, mask=taken > 0)
        tl.store(ids + at, start + tl.arange(0, BLOCK), mask=taken > 0)
        first += tl.sum(taken, 0)


@triton.jit
def _enough(source, n, top_k, top_p, peak, rate, BLOCK: tl.constexpr):
    """What top_p has to reach of the whole row; a score from which on there is enough, and how many, 0 if too many."""
    total, far_w, near_w = (tl.zeros([BLOCK], tl.float64),) * 3
    far_n, near_n = (tl.zeros([BLOCK], tl.int32),) * 2
    nats = 1.0 / rate * LOG2_E
    near, far = peak - nats * NEAR, peak - nats * FAR
    for start in range(0, n, BLOCK):
        x, there = _chunk(source, start, n, BLOCK)
        w = tl.where(there, _weights(x, peak, rate), 0.0)
        is_near, is_far = there & (x >= near), there & (x >= far)
        total += w.to(tl.float64)
        near_w += tl.where(is_near, w, 0.0).to(tl.float64)
        far_w += tl.where(is_far, w, 0.0).to(tl.float64)
        near_n += is_near.to(tl.int32)
        far_n += is_far.to(tl.int32)
    goal = top_p * tl.sum(total, 0)
    n_near, n_far = tl.sum(near_n, 0), tl.sum(far_n, 0)
    has_near = tl.where(top_k > 0, n_near >= top_k, tl.sum(near_w, 0) >= goal)
    has_far = tl.where(top_k > 0, n_far >= top_k, tl.sum(far_w, 0) >= goal)
    cut, count = tl.where(has_near, near, far), tl.where(has_near, n_near, n_far)
    return goal, cut, tl.where((has_near | has_far) & (count <= BLOCK), count, 0)


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
    row = scores_ptr + t * row_stride
    token = _best(row, vocabulary, BLOCK).to(tl.int32)
    if tl.load(whole_ptr + b * 4 + 3) == 0:
        peak = tl.load(row + token).to(tl.float32)
        rate = (1.0 / tl.load(reals_ptr + b * 3)).to(tl.float32) * LOG2_E
        top_p, min_p = tl.load(reals_ptr + b * 3 + 1), tl.load(reals_ptr + b * 3 + 2).to(tl.float32)
        u = _uniform(
            tl.load(whole_ptr + b * 4), tl.load(whole_ptr + b * 4 + 1), tl.load(position_ptr + t)
        )
        edge, places = tl.full([], -(2**31), tl.int64), tl.zeros([], tl.int64)
        found = tl.full([], -1, tl.int32)
        if LIMITED:
            top_k = tl.minimum(tl.load(whole_ptr + b * 4 + 2), vocabulary)
            goal, cut, n = _enough(row, vocabulary, top_k, top_p, peak, rate, BLOCK)
            if n > 0:
                aside, ids = aside_ptr + t * BLOCK, ids_ptr + t * BLOCK
                _copy_aside(row, vocabulary, cut, aside, ids, BLOCK)
                tl.debug_barrier()  # the copies are there
                edge, places = _edge(
                    aside, n, ordered(cut).to(tl.int64), top_k, top_p, goal, peak, rate, BLOCK
                )
                at = _drawn(aside, n, edge, places, min_p, u, peak, rate, True, BLOCK)
                found = tl.load(ids + at, mask=at >= 0, other=-1)
            else:
                edge, places = _edge(row, vocabulary, edge, top_k, top_p, goal, peak, rate, BLOCK)
                found = _drawn(row, vocabulary, edge, places, min_p, u, peak, rate, True, BLOCK)
        else:
            found = _drawn(row, vocabulary, edge, places, min_p, u, peak, rate, False, BLOCK)
        token = tl.where(found < 0, token, found)
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
