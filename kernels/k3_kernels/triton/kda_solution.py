"""The triangular system of a verify group, as small matrices. Device functions only.

Key and query of a token are rows 2i and 2i + 1 of R; G tokens, D channels. Letters as in `kda_verify`.
"""

import triton
import triton.language as tl


@triton.jit
def small_product(a, b):
    """`tf32.product` with its three parts side by side: of small tiles, which wait more than they compute. (Differences,
    since the compiler makes a sum of products one after the other.)
    """
    a_large = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    b_large = (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    left = tl.dot(a_large - a, b_large, input_precision="tf32")
    right = tl.dot(a_large, b - b_large, input_precision="tf32")
    return tl.dot(a_large, b_large, input_precision="tf32") - (left - right)


@triton.jit
def taken_apart(grown, shrunk, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Products of key and query rows (decay grown) with earlier keys (decay shrunk), [R, R]; keys are even columns."""
    pair = tl.arange(0, R)
    token = pair // 2
    is_key = (pair % 2 == 0) & (token < G)
    pairs = tl.zeros([R, R], dtype=tl.float32)
    for start in tl.range(0, D, C, num_stages=1):
        channel = start + tl.arange(0, C)
        at = grown + pair[:, None] * D + channel[None, :]
        left = tl.load(at, mask=(token < G)[:, None], other=0.0)
        at = shrunk + token[None, :] * D + channel[:, None]
        pairs += small_product(left, tl.load(at, mask=is_key[None, :], other=0.0))
    return pairs


@triton.jit
def solution_of(pairs, beta, G: tl.constexpr, R: tl.constexpr):
    """(I + A)(I + M)^-1 [R, R]: row 2i belongs to key i, row 2i + 1 to query i.

    M is strictly triangular over G tokens, so its alternating series is the finite product
    (I - M)(I + M^2)(I + M^4).. up to a power of at least G.
    """
    i, j = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    earlier = (j % 2 == 0) & (j < i)
    m = tl.where(earlier & (i % 2 == 0), pairs * beta[:, None], 0.0)
    a = tl.where(earlier & (i % 2 == 1), pairs, 0.0)
    solution = tl.where(i == j, 1.0, 0.0) - m
    squares: tl.constexpr = (G > 2) + (G > 4) + (G > 8)
    for _ in tl.range(squares):
        m = small_product(m, m)
        solution += small_product(solution, m)
    return solution + small_product(a, solution)
