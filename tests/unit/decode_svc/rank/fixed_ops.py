"""Kernel operations of fixed shape, as a backend must have them whose steps may be recorded: nothing is looked at.

The torch reference drops tokens that are not its own and groups tokens by expert, both by looking at values, which on a
CPU costs nothing. Here such tokens go to a page that nobody reads, and every expert sees every token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from k3_kernels.api import Ops, ReferenceAttention, ReferenceMoe
from k3_kernels.reference.moe import DenseExperts, ExpertWeights
from k3_kernels.reference.norm import situ
from torch import Tensor

from tests.model_runner import OPS


def write(cache_PTK: Tensor, slot_T: Tensor, latent_TK: Tensor) -> None:
    """The last page is nobody's (`tests.model_runner.Pools`)."""
    page_tokens = cache_PTK.shape[1]
    slot = torch.where(slot_T >= 0, slot_T, (cache_PTK.shape[0] - 1) * page_tokens)
    cache_PTK[slot // page_tokens, slot % page_tokens] = latent_TK.to(cache_PTK.dtype)


def experts(
    z_TZ: Tensor,
    ids_Tk: Tensor,
    weight_Tk: Tensor,
    weights: ExpertWeights,
    beta: float,
    linear_beta: float | None,
) -> Tensor:
    assert isinstance(weights, DenseExperts)
    inner = torch.einsum("tz,efz->tef", z_TZ, weights.w13_EFZ)
    gate, up = inner.chunk(2, -1)
    y_TEZ = torch.einsum("tef,ezf->tez", situ(gate, up, beta, linear_beta), weights.w2_EZF)
    weight_TE = weight_Tk.new_zeros(len(z_TZ), weights.count + 1)
    local = ids_Tk - weights.first
    elsewhere = (local < 0) | (local >= weights.count)
    weight_TE.scatter_add_(1, torch.where(elsewhere, weights.count, local), weight_Tk)
    return (weight_TE[:, None, :-1] @ y_TEZ.to(weight_TE.dtype)).squeeze(1)


class FixedAttention(ReferenceAttention):
    write = staticmethod(write)


class FixedMoe(ReferenceMoe):
    experts = staticmethod(experts)


def fixed_ops() -> Ops:
    """The reference with the two replaced."""
    return replace(OPS, attention=FixedAttention(), moe=FixedMoe(), capturable=True)
