"""Packing weights to MXFP4, the inverse of `k3_kernels.reference.mxfp4.unpack`; serving only unpacks.

Rounding is to the nearest of the 8 magnitudes (ties to the even code), with the smallest power-of-two scale that
avoids clipping the largest value of a group of 32.
"""

from __future__ import annotations

import torch
from k3_kernels.reference.mxfp4 import GROUP, MAGNITUDES
from torch import Tensor


def pack(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Returns packed uint8 [O, I / 2] and scale uint8 [O, I / 32]. I must be a multiple of 32."""
    assert weight_OI.shape[-1] % GROUP == 0, f"input width {weight_OI.shape[-1]}: groups of {GROUP}"
    groups = weight_OI.to(torch.float64).unflatten(-1, (-1, GROUP))
    peak = groups.abs().amax(-1)
    exponent = torch.ceil(torch.log2(peak / MAGNITUDES[-1]))
    exponent = torch.where(peak > 0, exponent, -127.0).clamp(-127, 127)
    scaled = groups / torch.exp2(exponent).unsqueeze(-1)
    grid = torch.tensor(MAGNITUDES, dtype=torch.float64, device=weight_OI.device)
    middle = (grid[1:] + grid[:-1]) / 2
    size = scaled.abs().contiguous()
    low, high = torch.bucketize(size, middle), torch.bucketize(size, middle, right=True)
    code = torch.where((low != high) & (low % 2 == 1), high, low)  # a tie goes to the even code
    code = torch.where((scaled < 0) & (code > 0), code + 8, code).flatten(-2).to(torch.uint8)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed, (exponent + 127).to(torch.uint8)
