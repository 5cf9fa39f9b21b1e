"""Merging partial attention results by their log-sum-exp (natural log).

A partial without keys is the identity: output 0, lse -inf. Its output is *selected away* before any
multiplication, because 0 * NaN is NaN and such rows may hold anything.
Letters: R partials, T tokens, H heads, D value dim.  Golden: helix/combine.json, helix/attn.safetensors.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(o_RTHD: Tensor, lse_RTH: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of the partials' keys. Returns o [T, H, D] and lse [T, H].

    Where no partial has a key: 0 and -inf.
    """
    peak = lse_RTH.amax(0)
    peak = torch.where(peak == float("-inf"), torch.zeros_like(peak), peak)
    weight = torch.exp(lse_RTH - peak)  # exactly 0 for -inf
    empty = (lse_RTH == float("-inf")).unsqueeze(-1)
    total = weight.sum(0)
    o = torch.where(empty, torch.zeros_like(o_RTHD), o_RTHD).to(lse_RTH.dtype)
    summed = (o * weight.unsqueeze(-1)).sum(0)
    safe = torch.where(total == 0, torch.ones_like(total), total)
    return (summed / safe.unsqueeze(-1)).to(o_RTHD.dtype), peak + torch.log(total)
