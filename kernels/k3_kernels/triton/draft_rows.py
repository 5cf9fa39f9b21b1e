"""Context rows of a latent drafter, from its layers' joint projection into the ring in one launch.

Rules: `k3.model.draft_attention.LatentRows` and `k3.model.draft_ring.DraftRing.write`; rows of rejected drafts and of
nobody's row are left out.

Letters: T = B * G tokens, L layers, C latent width, E rotated width, W = C + E, P tokens per page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from k3_kernels.drafts import Accepted, DraftContext, DraftPlace
from k3_kernels.triton import norm
from k3_kernels.triton.products import weight_of


@triton.jit
def turned(first, second, position, frequency, amplitude):
    """The pairs (first, second) rotated to positions; broadcast."""
    angle = position.to(tl.float32) * frequency
    cos, sin = tl.cos(angle) * amplitude, tl.sin(angle) * amplitude
    return first * cos - second * sin, first * sin + second * cos


@triton.jit
def normed(x, weight, width: tl.constexpr, eps, dtype: tl.constexpr):
    """RMSNorm of rows [.., X] in float32, rounded where `reference.norm.rms_norm` rounds."""
    x = x * tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    return (x.to(dtype).to(tl.float32) * weight[None, :]).to(dtype)


@triton.jit
def _write(
    z_ptr,
    norm_ptr,
    frequency_ptr,
    rows_ptr,
    start_ptr,
    accepted_ptr,
    slot_ptr,
    pool_ptr,
    accepted_stride,
    pool_unit,
    pool_layer,
    places,
    amplitude,
    eps,
    G: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    STEP: tl.constexpr,
    GAP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token, layer = tl.program_id(0), tl.program_id(1)
    b, g = token // G, token % G
    row = tl.load(rows_ptr + b)
    if (row != 0) & (g <= tl.load(accepted_ptr + b * accepted_stride)):
        dtype: tl.constexpr = pool_ptr.dtype.element_ty
        position = tl.load(start_ptr + b) + g
        unit = tl.load(slot_ptr + row) * places + position // P % places
        to = pool_ptr + unit * pool_unit + layer * pool_layer + position % P * (C + E)
        z = z_ptr + (token * L + layer).to(tl.int64) * (C + E)
        c, e = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_E)
        weight = tl.load(norm_ptr + layer * C + c, mask=c < C, other=0.0).to(tl.float32)
        latent = tl.load(z + c, mask=c < C, other=0.0).to(tl.float32)
        latent = normed(latent[None, :], weight, C, eps, dtype)
        tl.store(to + c[None, :], latent, mask=(c < C)[None, :])
        is_pair = e < E // 2
        first = tl.load(z + C + e * STEP, mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(z + C + e * STEP + GAP, mask=is_pair, other=0.0).to(tl.float32)
        frequency = tl.load(frequency_ptr + e, mask=is_pair, other=0.0)
        first, second = turned(first, second, position, frequency, amplitude)
        tl.store(to + C + e * STEP, first.to(dtype), mask=is_pair)
        tl.store(to + C + e * STEP + GAP, second.to(dtype), mask=is_pair)


class TritonDraftRows:
    """`drafts.DraftRows`."""

    def __init__(self, context: DraftContext) -> None:
        self._context = context
        self._projection = context.projection
        self._entries = torch.cat([weight_of(entry) for entry in context.entries])
        self._norms = torch.stack(context.latent_norms)

    def __call__(self, taps_TXD: Tensor, accepted: Accepted, place: DraftPlace) -> None:
        """Store the rows of what was accepted."""
        of, rotation, pool = self._context, self._context.rotation, place.pool
        _, n_layers, page_tokens, width = pool.shape
        projected = norm.rms_norm(self._projection(taps_TXD.flatten(1)), of.norm, of.eps)
        z = linear(projected, self._entries)
        rank = self._norms.shape[1]
        assert pool.stride()[2:] == (width, 1), f"ring: strides {pool.stride()}"
        step, gap = (2, 1) if rotation.is_interleaved else (1, rotation.dim // 2)
        n_tokens = len(z)
        _write[(n_tokens, n_layers)](
            *(z, self._norms, rotation.frequencies, accepted.rows_B, accepted.start_B),
            *(accepted.accepted_B, place.slot_R, pool, accepted.accepted_B.stride(0)),
            *(pool.stride(0), pool.stride(1), place.places, rotation.amplitude, of.eps),
            G=n_tokens // len(accepted.rows_B),
            L=n_layers,
            C=rank,
            E=rotation.dim,
            P=page_tokens,
            STEP=step,
            GAP=gap,
            BLOCK_C=triton.next_power_of_2(rank),
            BLOCK_E=max(2, triton.next_power_of_2(rotation.dim // 2)),
            num_warps=1,
        )
