"""What top_k and top_p leave of a row of scores: everything above an edge, and the first few of what equals it.

The edge is found by bisection over scores as ordered numbers, counting tokens for top_k and adding weights for top_p. Where
few tokens near the best are enough, which is nearly always, they are copied aside in one pass and only they are looked at
from then on; otherwise the whole row is, until few tokens are left that the edge may be. Weights are float32, relative to
the best, their sums float64 in a fixed order.

Device functions only. source: scores of a row, or of tokens copied aside. Rules: `k3.sampling.Recipe`.
"""

import triton
import triton.language as tl

from k3_kernels.triton.best import ordered, value_of

LOG2_E = tl.constexpr(1.4426950408889634)
NEAR, FAR = tl.constexpr(6.0), tl.constexpr(18.0)  # below the best, in e-folds: is that enough?


@triton.jit
def weights_of(x, peak, rate):
    """exp(rate (x - peak)) in base 2."""
    return tl.exp2((x - peak) * rate)


@triton.jit
def chunk(source, start, n, BLOCK: tl.constexpr):
    """Scores from `start` on, float32, and which of them there are."""
    at = start + tl.arange(0, BLOCK)
    there = at < n
    return tl.load(source + at, mask=there, other=float("-inf")).to(tl.float32), there


@triton.jit
def summed(values, BLOCK: tl.constexpr):
    """Sums of neighbours, which one thread holds."""
    few: tl.constexpr = 8 if BLOCK >= 256 else 1
    return tl.sum(tl.reshape(values, [BLOCK // few, few]), 1)


@triton.jit
def no_sums(dtype: tl.constexpr, BLOCK: tl.constexpr):
    """What sums of `summed` are added to."""
    return tl.zeros([BLOCK // 8 if BLOCK >= 256 else BLOCK], dtype)


@triton.jit
def _at_least(source, n, edge, peak, rate, BLOCK: tl.constexpr):
    """How many scores are `edge` or more, given as ordered number, and what they weigh."""
    least = value_of(edge.to(tl.int32))
    count, weight = no_sums(tl.int32, BLOCK), no_sums(tl.float64, BLOCK)
    for start in range(0, n, BLOCK):
        x, there = chunk(source, start, n, BLOCK)
        taken = there & (x >= least)
        count += summed(taken.to(tl.int32), BLOCK)
        weight += summed(tl.where(taken, weights_of(x, peak, rate), 0.0), BLOCK).to(tl.float64)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def copy_aside(source, n, least, limit, to, ids, BLOCK: tl.constexpr):
    """Scores that are neither below `least` nor `limit` or more, and their ids, in order of ids."""
    first = tl.zeros([], tl.int32)
    x, there = chunk(source, 0, n, BLOCK)
    for start in range(0, n, BLOCK):
        next_x, next_there = chunk(source, start + BLOCK, n, BLOCK)
        taken = (there & ~(x < least) & ~(x >= limit)).to(tl.int32)
        at = first + tl.cumsum(taken, 0) - 1
        tl.store(to + at, x, mask=taken > 0)
        tl.store(ids + at, start + tl.arange(0, BLOCK), mask=taken > 0)
        first += tl.sum(taken, 0)
        x, there = next_x, next_there
    tl.debug_barrier()  # the copies are there


@triton.jit
def _between(low, high, step):
    """A number in low + 1 .. high: halfway as numbers, in every second step as scores, which may lie close together."""
    halfway = low + (high - low + 1) // 2
    score = (value_of(low.to(tl.int32)) + value_of(high.to(tl.int32))) * 0.5
    by_score = tl.minimum(tl.maximum(ordered(score).to(tl.int64), low + 1), high)
    return tl.where(step % 2 == 0, by_score, halfway)


@triton.jit
def _bisected(source, n, low, high, goal, peak, rate, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest number in low .. high that at least `goal` tokens, or weight, reach; `low` if none."""
    step = tl.zeros([], tl.int32)
    while low < high:
        middle = _between(low, high, step)
        step += 1
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
    n_low,
    high,
    goal,
    aside,
    ids,
    peak,
    rate,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_bisected` for long rows, `n_low` from `low` on: once few tokens are left, only they are looked at."""
    step, n_above, above = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.float64)
    while (low < high) & (n_low - n_above > BLOCK):
        middle = _between(low, high, step)
        step += 1
        count, weight = _at_least(row, n, middle, peak, rate, BLOCK)
        reached = weight if BY_WEIGHT else count.to(tl.float64)
        if reached >= goal:
            low, n_low = middle, count
        else:
            high, n_above, above = middle - 1, count, reached
    if low < high:
        least, limit = value_of(low.to(tl.int32)), value_of((high + 1).to(tl.int32))
        copy_aside(row, n, least, limit, aside, ids, BLOCK)
        left = n_low - n_above
        low = _bisected(aside, left, low, high, goal - above, peak, rate, BY_WEIGHT, BLOCK)
        tl.debug_barrier()  # the place may be used again
    return low


@triton.jit
def edge_of(
    source,
    n,
    low,
    n_low,
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
    """The lowest score that stays, as ordered number, and how many of those that equal it.

    Of tokens from `low` on, `n_low`. goal: weight for top_p.
    """
    high = ordered(peak).to(tl.int64)
    edge, places = low, n.to(tl.int64)
    if top_k > 0:
        aim = top_k.to(tl.float64)
        if FEW:
            edge = _bisected(source, n, low, high, aim, peak, rate, False, BLOCK)
        else:
            edge = _closed_in(
                source, n, low, n_low, high, aim, aside, ids, peak, rate, False, BLOCK
            )
        n_low, weight = _at_least(source, n, edge, peak, rate, BLOCK)
        goal = top_p * weight
    if top_p < 1.0:
        if FEW:
            edge = _bisected(source, n, edge, high, goal, peak, rate, True, BLOCK)
        else:
            edge = _closed_in(
                source, n, edge, n_low, high, goal, aside, ids, peak, rate, True, BLOCK
            )
        _, above = _at_least(source, n, edge + 1, peak, rate, BLOCK)
        one = weights_of(value_of(edge.to(tl.int32)), peak, rate).to(tl.float64)
        share = tl.ceil((goal - above) / one)
        places = tl.where((share > 1.0) & (share <= n), share, 1.0).to(tl.int64)
    return edge, places


@triton.jit
def enough(source, n, top_k, top_p, peak, rate, BLOCK: tl.constexpr):
    """What top_p has to reach of the whole row; a score from which on there is enough, -inf if unknown, and how many."""
    total, near_w, far_w = (
        no_sums(tl.float64, BLOCK),
        no_sums(tl.float64, BLOCK),
        no_sums(tl.float64, BLOCK),
    )
    near_n, far_n = no_sums(tl.int32, BLOCK), no_sums(tl.int32, BLOCK)
    nats = 1.0 / rate * LOG2_E
    near, far = peak - nats * NEAR, peak - nats * FAR
    for start in range(0, n, BLOCK):
        x, there = chunk(source, start, n, BLOCK)
        w = tl.where(there, weights_of(x, peak, rate), 0.0)
        is_near, is_far = there & ~(x < near), there & ~(x < far)
        total += summed(w, BLOCK).to(tl.float64)
        near_w += summed(tl.where(is_near, w, 0.0), BLOCK).to(tl.float64)
        far_w += summed(tl.where(is_far, w, 0.0), BLOCK).to(tl.float64)
        near_n += summed(is_near.to(tl.int32), BLOCK)
        far_n += summed(is_far.to(tl.int32), BLOCK)
    goal = top_p * tl.sum(total, 0)
    n_near, n_far = tl.sum(near_n, 0), tl.sum(far_n, 0)
    has_near = tl.where(top_k > 0, n_near >= top_k, tl.sum(near_w, 0) >= goal)
    has_far = tl.where(top_k > 0, n_far >= top_k, tl.sum(far_w, 0) >= goal)
    cut = tl.where(has_near, near, tl.where(has_far, far, float("-inf")))
    return goal, cut, tl.where(has_near, n_near, tl.where(has_far, n_far, n))
