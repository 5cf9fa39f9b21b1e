"""Norms and activations in one launch each, rounding where `k3_kernels.reference.norm` rounds.

A program owns some rows, whole. Rows lie in views: their last axis is contiguous, the axes before it have any strides
(gates and latents are columns of a joint projection), which is why a row's place is computed from two indices.

Letters: R rows, N = rows of the second axis (heads), D width of a row, F inner width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.triton.moe import soft_clip

TILE = 4096  # elements of a program; a wider row is one program's


@triton.jit
def _rms_norm(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    n_rows,
    heads,
    x_token,
    x_head,
    gate_token,
    gate_head,
    width,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside = (row < n_rows)[:, None] & (channel < width)[None, :]
    token, head = row // heads, row % heads
    at = (token * x_token + head * x_head)[:, None] + channel[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    x = (x if GATED else x.to(y_ptr.dtype.element_ty)).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=channel < width, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    if GATED:
        at = (token * gate_token + head * gate_head)[:, None] + channel[None, :]
        gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y = y * weight[None, :] * tl.sigmoid(gate)
    else:
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32) * weight[None, :]
    at = row[:, None] * width + channel[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Rows of the last but one axis, stride of what is before it, its own; x has two or three axes."""
    assert x.stride(-1) == 1, f"rows of a norm: strides {x.stride()}"
    if x.dim() == 2:
        return 1, x.stride(0), 0
    assert x.dim() == 3, f"a norm over {tuple(x.shape)}: expected two or three axes"
    return x.shape[1], x.stride(0), x.stride(1)


def _normed(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gated: bool) -> Tensor:
    y = torch.empty(*x.shape, dtype=(gate if gated else weight).dtype, device=x.device)
    width = x.shape[-1]
    n_rows = x.numel() // width
    if not n_rows:
        return y
    heads, x_token, x_head = _strides(x)
    _, gate_token, gate_head = _strides(gate)
    block = triton.next_power_of_2(width)
    rows = max(1, min(TILE // block, triton.next_power_of_2(n_rows)))
    _rms_norm[(triton.cdiv(n_rows, rows),)](
        x,
        gate,
        weight,
        y,
        n_rows,
        heads,
        x_token,
        x_head,
        gate_token,
        gate_head,
        width,
        eps,
        ROWS=rows,
        WIDTH=block,
        GATED=gated,
        num_warps=8 if block > TILE else 4,
    )
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.norm.rms_norm` for x of two axes or more; with more than three those in front follow each other."""
    if x.dim() > 3:
        return rms_norm(x.flatten(0, -3), weight, eps).view(x.shape)
    return _normed(x, x, weight, eps, gated=False)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.norm.gated_rms_norm` for two or three axes; x may be wider than the gate."""
    assert x.shape == gate.shape, f"gate {tuple(gate.shape)} of rows {tuple(x.shape)}"
    return _normed(x, gate, weight, eps, gated=True)


@triton.jit
def _gate(x_ptr, gate_ptr, y_ptr, x_row, gate_row, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_row + channel, mask=inside)
    gate = tl.load(gate_ptr + row * gate_row + channel, mask=inside, other=0.0)
    gate = tl.sigmoid(gate.to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(y_ptr + row * width + channel, (x.to(tl.float32) * gate).to(dtype), mask=inside)


def gate(x: Tensor, gate: Tensor) -> Tensor:
    """x sigmoid(gate) of [T, X], both rounded to x's dtype as torch does. Rows of either may be strided."""
    n_rows, width = x.shape
    assert x.stride(1) == gate.stride(1) == 1, f"{x.stride()}, gate {gate.stride()}"
    y = torch.empty(n_rows, width, dtype=x.dtype, device=x.device)
    block = min(TILE, triton.next_power_of_2(width))
    if n_rows:
        grid = (n_rows, triton.cdiv(width, block))
        _gate[grid](x, gate, y, x.stride(0), gate.stride(0), width, BLOCK=block)
    return y


@triton.jit
def _situ(
    x_ptr, y_ptr, x_row, width, beta, linear_beta, CLIPPED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < width
    gate = tl.load(x_ptr + row * x_row + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + width + f, mask=inside, other=0.0).to(tl.float32)
    if CLIPPED:
        up = soft_clip(up, linear_beta)
    y = soft_clip(gate, beta) * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * width + f, y.to(y_ptr.dtype.element_ty), mask=inside)


def situ(gate_up_TF: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """`reference.norm.situ` of a joint projection [T, 2F]: [T, F]."""
    n_rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    assert gate_up_TF.stride(1) == 1, f"gate and up: strides {gate_up_TF.stride()}"
    y = torch.empty(n_rows, width, dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    block = min(TILE // 2, triton.next_power_of_2(width))
    if n_rows:
        _situ[(n_rows, triton.cdiv(width, block))](
            gate_up_TF,
            y,
            gate_up_TF.stride(0),
            width,
            beta,
            1.0 if linear_beta is None else linear_beta,
            CLIPPED=linear_beta is not None,
            BLOCK=block,
        )
    return y
