"""Storing latent rows at their pool slots without a host read: the slot table alone decides what is written."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write(
    cache,
    slot,
    latent,
    page_stride,
    latent_stride,
    P: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0)
    at = tl.load(slot + token).to(tl.int64)
    if at >= 0:  # -1: another rank's, or nobody's
        k = tl.arange(0, BLOCK_K)
        row = tl.load(latent + token.to(tl.int64) * latent_stride + k, mask=k < K)
        to = cache + at // P * page_stride + at % P * K + k
        tl.store(to, row.to(cache.dtype.element_ty), mask=k < K)


def write_rows(cache_PTK: Tensor, slot_T: Tensor, latent_TK: Tensor) -> None:
    """cache [pages, P, K], rows of a page adjacent; slot [T] = page * P + offset or -1; latent [T, K]."""
    width = latent_TK.shape[1]
    assert latent_TK.stride(1) == 1, "latent rows are contiguous"
    assert cache_PTK.stride(1) == width, "rows of a page follow each other"
    _write[(latent_TK.shape[0],)](
        cache_PTK,
        slot_T,
        latent_TK,
        cache_PTK.stride(0),
        latent_TK.stride(0),
        P=cache_PTK.shape[1],
        K=width,
        BLOCK_K=triton.next_power_of_2(width),
        num_warps=4,
    )
