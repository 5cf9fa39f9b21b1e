"""MXFP4 weights: 4-bit E2M1 values with one power-of-two scale per 32 inputs.

Byte b of a row holds input 2b in its low nibble and 2b + 1 in its high one; the scale is the raw E8M0
byte, `2 ** (scale - 127)`. Every product is exact in bfloat16 and wider.
Golden: k3/components.safetensors (mxfp4), k3/experts-mxfp4.safetensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])


def unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """packed: uint8 [..., O, I / 2]; scale: uint8 [..., O, I / 32]. Returns [..., O, I] in `dtype`."""
    low, high = packed & 0xF, packed >> 4
    codes = torch.stack((low, high), -1).flatten(-2).to(torch.int64)
    values = _VALUES.to(packed.device)[codes].unflatten(-1, (-1, GROUP))
    factor = torch.exp2(scale.to(torch.float32) - 127.0).unsqueeze(-1)
    return (values * factor).flatten(-2).to(dtype)
