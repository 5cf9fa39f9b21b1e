"""The attention-residual mixing site in one launch: scores, softmax and mixture of a token's candidates.

One program owns a token. It reads the candidates twice, the second time out of the L2: all scores are needed before
the first channel of the mixture. Statistics, softmax and mixture in float32, as in `k3_kernels.reference.attnres`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16384  # elements of all candidates a program looks at once; so few tokens have all their loads under way


@triton.jit
def _mix(
    v_ptr,
    weight_ptr,
    o_ptr,
    v_token,
    v_candidate,
    n_candidates,
    width,
    eps,
    J: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, J)
    here = candidate < n_candidates
    rows = v_ptr + token * v_token + candidate[:, None] * v_candidate
    products = tl.zeros([J], dtype=tl.float32)
    squares = tl.zeros([J], dtype=tl.float32)
    for start in tl.range(0, width, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        inside = channel < width
        v = tl.load(rows + channel[None, :], mask=here[:, None] & inside[None, :], other=0.0).to(
            tl.float32
        )
        weight = tl.load(weight_ptr + channel, mask=inside, other=0.0)
        products += tl.sum(v * weight[None, :], 1)
        squares += tl.sum(v * v, 1)
    score = products * tl.rsqrt(squares / width + eps)
    score = tl.where(here, score, float("-inf"))
    p = tl.exp(score - tl.max(score, 0))
    p = p / tl.sum(p, 0)
    for start in tl.range(0, width, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        inside = channel < width
        v = tl.load(rows + channel[None, :], mask=here[:, None] & inside[None, :], other=0.0).to(
            tl.float32
        )
        o = tl.sum(p[:, None] * v, 0).to(o_ptr.dtype.element_ty)
        tl.store(o_ptr + token * width + channel, o, mask=inside)


def mix(candidates_TJH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """`reference.attnres.mix`. Candidates may be a view; their last axis is contiguous, weight_H is float32."""
    n_tokens, n_candidates, width = candidates_TJH.shape
    assert candidates_TJH.stride(2) == 1, f"candidates: strides {candidates_TJH.stride()}"
    assert weight_H.dtype == torch.float32, f"mixing weight in {weight_H.dtype}: expected float32"
    o = torch.empty(n_tokens, width, dtype=candidates_TJH.dtype, device=candidates_TJH.device)
    padded = triton.next_power_of_2(n_candidates)
    if n_tokens:
        _mix[(n_tokens,)](
            candidates_TJH,
            weight_H,
            o,
            candidates_TJH.stride(0),
            candidates_TJH.stride(1),
            n_candidates,
            width,
            eps,
            J=padded,
            CHANNELS=min(TILE // padded, triton.next_power_of_2(width)),
            num_warps=8,
        )
    return o
