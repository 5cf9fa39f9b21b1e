"""The attention-residual mixing site in one launch: scores, softmax and mixture of a token's candidates.

`read` adds what comes before a site (outputs not yet in the residual) and what follows it (the sublayer's norm): then the
stream is read once between two sublayers.

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


@triton.jit
def _read(
    v_ptr,
    output_ptr,
    second_ptr,
    score_ptr,
    norm_ptr,
    o_ptr,
    v_token,
    v_candidate,
    output_token,
    second_token,
    n_blocks,
    width,
    eps,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One token. BLOCKS: room for the banked blocks, 0 where there are none; the residual stays in registers."""
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = v_ptr.dtype.element_ty
    channel = tl.arange(0, WIDTH)
    inside = channel < width
    stream = v_ptr + token * v_token
    residual = tl.load(stream + channel, mask=inside, other=0.0).to(tl.float32)
    if OUTPUTS > 0:
        at = output_ptr + token * output_token + channel
        output = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if OUTPUTS > 1:
            at = second_ptr + token * second_token + channel
            second = tl.load(at, mask=inside, other=0.0).to(dtype).to(tl.float32)
            output = (output + second).to(dtype).to(tl.float32)
        residual = (residual + output).to(dtype).to(tl.float32)
    mixture = residual
    if BLOCKS > 0:
        block = tl.arange(0, BLOCKS)
        real = block < n_blocks
        rows = stream + (1 + block)[:, None] * v_candidate
        products = tl.zeros([BLOCKS], dtype=tl.float32)
        squares = tl.zeros([BLOCKS], dtype=tl.float32)
        for start in tl.range(0, width, CHANNELS):
            c = start + tl.arange(0, CHANNELS)
            here = real[:, None] & (c < width)[None, :]
            v = tl.load(rows + c[None, :], mask=here, other=0.0).to(tl.float32)
            products += tl.sum(v * tl.load(score_ptr + c, mask=c < width, other=0.0)[None, :], 1)
            squares += tl.sum(v * v, 1)
        score = tl.where(real, products * tl.rsqrt(squares / width + eps), float("-inf"))
        weight = tl.load(score_ptr + channel, mask=inside, other=0.0)
        own = tl.sum(residual * weight, 0)
        own = own * tl.rsqrt(tl.sum(residual * residual, 0) / width + eps)
        peak = tl.maximum(own, tl.max(score, 0))
        own = tl.exp(own - peak)
        p = tl.exp(score - peak)
        total = own + tl.sum(p, 0)
        mixture = residual * (own / total)
        for j in tl.range(0, n_blocks):
            banked = stream + (1 + j) * v_candidate + channel
            share = tl.sum(tl.where(block == j, p, 0.0), 0) / total
            mixture += share * tl.load(banked, mask=inside, other=0.0).to(tl.float32)
        mixture = mixture.to(dtype).to(tl.float32)
    y = mixture * tl.rsqrt(tl.sum(mixture * mixture, 0) / width + eps)
    y = y.to(dtype).to(tl.float32) * tl.load(norm_ptr + channel, mask=inside, other=0.0).to(
        tl.float32
    )
    tl.store(o_ptr + token * width + channel, y.to(dtype), mask=inside)
    if OUTPUTS > 0:
        tl.store(stream + channel, residual.to(dtype), mask=inside)


def read(
    candidates_TJH: Tensor,
    outputs: tuple[Tensor, ...],
    score_H: Tensor | None,
    norm_H: Tensor,
    eps: float,
) -> Tensor:
    """`reference.attnres.read`. Rows of all tensors may be strided; at most two outputs, the first in the stream's dtype."""
    v, n_blocks = candidates_TJH, 0 if score_H is None else candidates_TJH.shape[1] - 1
    n_tokens, _, width = v.shape
    assert all(x.stride(-1) == 1 for x in (v, *outputs)), "rows are contiguous"
    assert len(outputs) <= 2, f"{len(outputs)} outputs: expected at most 2"
    assert all(x.dtype == v.dtype for x in outputs[:1]), f"output in {outputs[0].dtype}"
    o = torch.empty(n_tokens, width, dtype=v.dtype, device=v.device)
    first, second = (*outputs, v, v)[:2]  # any tensor where there is none
    padded = triton.next_power_of_2(n_blocks) if n_blocks else 0
    whole = triton.next_power_of_2(width)
    if n_tokens:
        _read[(n_tokens,)](
            v,
            first,
            second,
            norm_H if score_H is None else score_H,
            norm_H,
            o,
            v.stride(0),
            v.stride(1),
            first.stride(0),
            second.stride(0),
            n_blocks,
            width,
            eps,
            OUTPUTS=len(outputs),
            BLOCKS=padded,
            CHANNELS=min(TILE // padded, whole) if padded else whole,
            WIDTH=whole,
            num_warps=8,
        )
    return o
