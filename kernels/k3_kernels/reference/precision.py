"""The precision rule every reference follows: statistics, softmax, gates and states in float32.

A float64 model computes them in float64, which is what makes greedy equality testable exactly.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype of an activation dtype: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device=device)


def constant(value: float, like: Tensor) -> Tensor:
    """`value` as a scalar tensor. On one token's tensors a Python number costs three times the operation."""
    return _constant(value, like.dtype, like.device)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, kept; x already wide."""
    squares = x.square().sum(-1, keepdim=True)
    return torch.rsqrt(torch.addcmul(constant(eps, x), squares, constant(1 / x.shape[-1], x)))
