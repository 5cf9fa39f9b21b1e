"""RMSNorm and the SiTU activation, elementwise pieces of every layer.

Statistics in float32 (float64 for float64 models). RMSNorm casts back to the activation dtype *before*
multiplying by the weight: in bfloat16 the order shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.reference.precision import constant, inverse_rms, wide


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., D], rounded to the weight's dtype first; weight: [D]. Returns the weight's dtype."""
    dtype = weight.dtype
    xw = x.to(dtype).to(wide(dtype))
    return (xw * inverse_rms(xw, eps)).to(dtype) * weight


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm(x) * weight * sigmoid(gate), all of it in the wide dtype; returns gate's dtype.

    x, gate: [..., D]; weight: [D] in the wide dtype.
    """
    acc = wide(gate.dtype)
    xw = x.to(acc)
    y = xw * inverse_rms(xw, eps)
    return (y * weight * torch.sigmoid(gate.to(acc))).to(gate.dtype)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """beta*tanh(g/beta)*sigmoid(g) times the up branch, itself soft-clipped at linear_beta (None: not).

    gate, up: same shape and dtype; computed wide, returned in their dtype.
    """
    acc = wide(gate.dtype)
    g, u = gate.to(acc), up.to(acc)
    if linear_beta is not None:
        u = torch.tanh(u * constant(1 / linear_beta, u)) * constant(linear_beta, u)
    clipped = torch.tanh(g * constant(1 / beta, g)) * constant(beta, g)
    return (clipped * torch.sigmoid(g) * u).to(gate.dtype)
