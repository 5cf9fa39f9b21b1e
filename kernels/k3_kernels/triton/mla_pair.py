"""What the two warp groups of `mla_wide` do with a pair of tiles. Device functions only.

Each returns its new maximum, sum and output, relative to the pair's last maximum. Letters and barriers as there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

everybody = vars(gl).get("barrier") or gl.thread_barrier  # its name until triton 3.6


@gluon.jit
def _weights(s, keys, bound_M, peak_M, scale):
    """P of a tile's scores, the new maximum, and what P is relative to."""
    s = gl.where(keys[None, :] < bound_M[:, None], s, float("-inf"))
    peak = gl.maximum(peak_M, gl.max(s, 1) * scale)
    shift = gl.where(peak == float("-inf"), 0.0, peak)
    return gl.exp2(s * scale - shift[:, None]), peak, shift


@gluon.jit
def _done(barrier):
    """A warp group is done with what the barrier guards."""
    everybody()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _hand_over(p, peak, place, to_peak, passed):
    """P of a tile, in the place of its shared part, and the maximum so far to the other group."""
    place.store(p)
    to_peak.store(peak)
    fence_async_shared()
    _done(passed)


@gluon.jit
def _added(p, sum_M, acc, peak_M, shift, of_output: gl.constexpr):
    """Sum with P's, and the output still without; both relative to `shift`."""
    fade = gl.exp2(peak_M - shift)
    return sum_M * fade + gl.sum(p, 1), acc * gl.convert_layout(fade, of_output)[:, None]


@gluon.jit
def first_of_pair(
    queries, keys, barriers, passing, phase, tile_keys, bound_M, scale, peak_M, sum_M, acc,
    score: gl.constexpr, output: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Group 0 on a pair: scores of the first tile, the lower half of both tiles' values."""
    q_lo, q_hi, q_r, _, _ = queries
    k_lo, k_hi, k_r = keys
    ready_lo, ready_hi, free_lo, free_hi = barriers
    peaks, passed = passing
    left: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    of_scores: gl.constexpr = gl.SliceLayout(1, score)
    of_output: gl.constexpr = gl.SliceLayout(1, output)
    s = gl.zeros([M, N], gl.float32, score)
    mbarrier.wait(ready_lo.index(0), phase)
    s = warpgroup_mma(q_lo, k_lo.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(ready_hi.index(0), phase)
    s = warpgroup_mma(q_hi, k_hi.index(0).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(q_r, k_r.index(0).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    _done(free_hi.index(0))
    p, peak, shift = _weights(s, tile_keys, bound_M, peak_M, scale)
    p_0 = p.to(k_lo.dtype)
    _hand_over(p_0, peak, k_r.index(0), peaks.index(0), passed.index(0))
    sum_M, acc = _added(p, sum_M, acc, peak_M, shift, of_output)
    acc = warpgroup_mma(gl.convert_layout(p_0, left), k_lo.index(0), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _done(free_lo.index(0))
    mbarrier.wait(ready_lo.index(1), phase)
    mbarrier.wait(passed.index(1), phase)
    peak_M = peaks.index(1).load(of_scores)
    p_1 = k_r.index(1).load(left)
    fade = gl.exp2(peak - gl.where(peak_M == float("-inf"), 0.0, peak_M))
    acc = acc * gl.convert_layout(fade, of_output)[:, None]
    acc = warpgroup_mma(p_1, k_lo.index(1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _done(free_lo.index(1))
    return peak_M, sum_M * fade, acc


@gluon.jit
def second_of_pair(
    queries, keys, barriers, passing, phase, tile_keys, bound_M, scale, peak_M, sum_M, acc,
    score: gl.constexpr, output: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Group 1 on a pair: scores of the second tile, the upper half of both tiles' values."""
    q_lo, q_hi, q_r, _, _ = queries
    k_lo, k_hi, k_r = keys
    ready_lo, ready_hi, free_lo, free_hi = barriers
    peaks, passed = passing
    left: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    of_scores: gl.constexpr = gl.SliceLayout(1, score)
    of_output: gl.constexpr = gl.SliceLayout(1, output)
    dtype: gl.constexpr = k_lo.dtype
    s = gl.zeros([M, N], gl.float32, score)
    mbarrier.wait(ready_hi.index(1), phase)
    s = warpgroup_mma(q_hi, k_hi.index(1).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(ready_lo.index(1), phase)
    s = warpgroup_mma(q_lo, k_lo.index(1).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(q_r, k_r.index(1).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    _done(free_lo.index(1))
    mbarrier.wait(passed.index(0), phase)
    peak_0 = peaks.index(0).load(of_scores)
    p_0 = k_r.index(0).load(left)
    p, peak, shift = _weights(s, tile_keys, bound_M, peak_0, scale)
    p_1 = p.to(dtype)
    _hand_over(p_1, peak, k_r.index(1), peaks.index(1), passed.index(1))
    sum_M, acc = _added(p, sum_M, acc, peak_M, shift, of_output)
    fade_0 = gl.convert_layout(gl.exp2(peak_0 - shift), gl.SliceLayout(1, left))
    p_0 = (p_0.to(gl.float32) * fade_0[:, None]).to(dtype)
    mbarrier.wait(ready_hi.index(0), phase)
    acc = warpgroup_mma(p_0, k_hi.index(0), acc, is_async=True)
    acc = warpgroup_mma(gl.convert_layout(p_1, left), k_hi.index(1), acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc, p_0])[0]
    _done(free_hi.index(0))
    acc = warpgroup_mma_wait(0, deps=[acc])
    _done(free_hi.index(1))
    return peak, sum_M, acc
