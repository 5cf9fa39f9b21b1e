"""Block attention residuals: the mixing site of `kimi-k3` layers.

Letters: T tokens, J candidates (running residual and banked blocks, any order), H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.reference.precision import inverse_rms, wide


def mix(candidates_TJH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Softmax mixture of the candidates, scored by <rmsnorm(candidate), weight>.

    weight_H: norm weight times projection, fused at load, in the wide dtype.
    Returns [T, H] in the candidates' dtype. The values mixed are the un-normalised candidates.
    """
    v = candidates_TJH.to(wide(candidates_TJH.dtype))
    p = torch.softmax((v @ weight_H) * inverse_rms(v, eps).squeeze(-1), dim=-1)  # [T, J]
    return (p.unsqueeze(1) @ v).squeeze(1).to(candidates_TJH.dtype)
