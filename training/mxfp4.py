"""MXFP4 rounding of expert matrices in K3's packed layout: groups of 32 along the input, E2M1 codes, E8M0 scales.

Two codes a byte, the even column in the low nibble. Each group takes the better of two exponents by squared error.
Golden: k3/components.safetensors `mxfp4.*`.
"""

import torch
from torch import Tensor

GROUP = 32
_LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_EDGES = (_LEVELS[1:] + _LEVELS[:-1]) / 2


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [rows, cols] -> packed u8 [rows, cols / 2], scale u8 [rows, cols / 32]."""
    rows, cols = weight.shape
    if cols % GROUP:
        raise ValueError(f"weight has {cols} columns; MXFP4 needs a multiple of {GROUP}")
    groups = weight.float().reshape(rows, cols // GROUP, GROUP)
    peak = groups.abs().amax(-1).clamp(min=2.0**-120)
    high = torch.ceil(torch.log2(peak / 6.0))
    best_error = torch.full_like(peak, float("inf"))
    best_code = torch.zeros_like(groups, dtype=torch.uint8)
    best_exponent = high
    for exponent in (high, high - 1):
        scaled = groups * torch.exp2(-exponent)[..., None]
        magnitude = torch.bucketize(scaled.abs(), _EDGES.to(scaled.device))
        value = _LEVELS.to(scaled.device)[magnitude] * scaled.sign()
        error = ((value - scaled) * torch.exp2(exponent)[..., None]).square().sum(-1)
        code = (magnitude + 8 * (scaled < 0)).to(torch.uint8)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_code = torch.where(better[..., None], code, best_code)
        best_exponent = torch.where(better, exponent, best_exponent)
    code = best_code.reshape(rows, cols)
    packed = code[:, 0::2] | (code[:, 1::2] << 4)
    return packed, (best_exponent + 127).to(torch.uint8)


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `pack`, fp32."""
    rows = packed.shape[0]
    code = torch.stack((packed & 15, packed >> 4), -1).reshape(rows, -1)
    value = _LEVELS.to(packed.device)[(code & 7).long()] * torch.where(code >= 8, -1.0, 1.0)
    factor = torch.exp2(scale.float() - 127).repeat_interleave(GROUP, 1)
    return value * factor
