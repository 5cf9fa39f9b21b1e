"""Block attention residuals: the mixing site of `kimi-k3` layers.

Letters: T tokens, J candidates (running residual and banked blocks, any order), H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.reference.norm import rms_norm
from k3_kernels.reference.precision import inverse_rms, wide


def mix(candidates_TJH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Softmax mixture of the candidates, scored by <rmsnorm(candidate), weight>.

    weight_H: norm weight times projection, fused at load, in the wide dtype.
    Returns [T, H] in the candidates' dtype. The values mixed are the un-normalised candidates.
    """
    v = candidates_TJH.to(wide(candidates_TJH.dtype))
    p = torch.softmax((v @ weight_H) * inverse_rms(v, eps).squeeze(-1), dim=-1)  # [T, J]
    return (p.unsqueeze(1) @ v).squeeze(1).to(candidates_TJH.dtype)


def add(residual_TH: Tensor, outputs: tuple[Tensor, ...]) -> None:
    """Outputs of one sublayer, added up in the dtype of the first, come to the residual (in place)."""
    if outputs:
        total, *others = outputs
        for output in others:
            total = total + output.to(total.dtype)
        residual_TH.add_(total)


def read(
    candidates_TJH: Tensor,
    outputs: tuple[Tensor, ...],
    score_H: Tensor | None,
    norm_H: Tensor,
    eps: float,
) -> Tensor:
    """What a sublayer reads: `add` to the residual (candidate 0), then the mixture's norm, [T, H].

    score_H: of the site, as in `mix`; None: the residual alone is read. norm_H: of the sublayer's RMSNorm.
    """
    add(candidates_TJH[:, 0], outputs)
    if score_H is None or candidates_TJH.shape[1] == 1:
        return rms_norm(candidates_TJH[:, 0], norm_H, eps)
    return rms_norm(mix(candidates_TJH, score_H, eps), norm_H, eps)
