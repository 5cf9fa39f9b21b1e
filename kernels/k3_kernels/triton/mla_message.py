"""Messages of context ranks in one launch each way: project and pack, unpack and merge. Rules: `reference.message`.

Letters: R ranks, T tokens, H heads, C latent width, V value dims.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.reference import message as reference
from k3_kernels.triton.combine import merge


@triton.jit
def _project(
    o,
    lse,
    up,
    to_o,
    to_lse,
    n_tokens,
    o_token,
    o_head,
    up_head,
    up_c,
    up_v,
    to_message,
    to_token,
    to_head,
    lse_to_message,
    lse_to_token,
    lse_to_head,
    H: tl.constexpr,
    J: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One head of some tokens: the output times the value projection, beside its lse. J: heads of a message."""
    head = tl.program_id(0).to(tl.int64)
    message, place = head // J, head % J
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    v = tl.arange(0, BLOCK_V)
    real, value = t < n_tokens, v < V
    acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for lo in tl.range(0, C, BLOCK_C):
        here = lo + c < C
        o_at = o + t[:, None] * o_token + head * o_head + (lo + c)[None, :]
        up_at = up + head * up_head + (lo + c)[:, None] * up_c + v[None, :] * up_v
        o_TC = tl.load(o_at, mask=real[:, None] & here[None, :], other=0.0)
        up_CV = tl.load(up_at, mask=here[:, None] & value[None, :], other=0.0)
        acc = tl.dot(o_TC, up_CV, acc, input_precision="ieee")
    at = to_o + message * to_message + t[:, None] * to_token + place * to_head + v[None, :]
    tl.store(at, acc.to(to_o.dtype.element_ty), mask=real[:, None] & value[None, :])
    log_sum = tl.load(lse + t * H + head, mask=real, other=0.0)
    at = to_lse + message * lse_to_message + t * lse_to_token + place * lse_to_head
    tl.store(at, log_sum, mask=real)


def pack(o_THC: Tensor, lse_TH: Tensor, value_up_HCV: Tensor | None, n_messages: int = 1) -> Tensor:
    """[R, T, H / R, bytes] uint8, R = `n_messages`. Without a projection there is nothing to fuse."""
    if value_up_HCV is None:
        return reference.pack(o_THC, lse_TH, None, n_messages)
    n_tokens, heads, latent = o_THC.shape
    dim, size, share = value_up_HCV.shape[2], o_THC.element_size(), heads // n_messages
    assert share * n_messages == heads, f"{heads} heads in {n_messages} messages"
    shape = (n_messages, n_tokens, share, dim * size + 4)
    message = torch.empty(shape, dtype=torch.uint8, device=o_THC.device)
    to_o, to_lse = _views(message, o_THC.dtype)
    block_t = min(64, max(16, triton.next_power_of_2(n_tokens)))
    assert o_THC.stride(2) == 1, "a head's latent is contiguous"
    constants = cast(
        "dict[str, Any]",
        {
            "H": heads,
            "J": share,
            "C": latent,
            "V": dim,
            "BLOCK_T": block_t,
            "BLOCK_C": min(64, max(16, triton.next_power_of_2(latent))),
            "BLOCK_V": max(16, triton.next_power_of_2(dim)),
        },
    )
    _project[(heads, triton.cdiv(n_tokens, block_t))](
        o_THC,
        lse_TH.contiguous(),
        value_up_HCV,
        to_o,
        to_lse,
        n_tokens,
        *o_THC.stride()[:2],
        *value_up_HCV.stride(),
        *to_o.stride()[:3],
        *to_lse.stride(),
        **constants,
    )
    return message


def merge_packed(message_RTHb: Tensor, dtype: torch.dtype) -> Tensor:
    """o [T, H, X] in `dtype`, read where it arrived."""
    return merge(*_views(message_RTHb, dtype))[0]


def _views(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output [..., X] and float32 log-sum-exp [...] inside a message: no copy, so X * itemsize is a multiple of 4."""
    o_bytes = message.shape[-1] - 4
    if o_bytes % 4:
        raise ValueError(
            f"a head's output of {o_bytes} bytes: a message needs a multiple of 4; set backends.attention=reference"
        )
    o = message.view(dtype)[..., : o_bytes // dtype.itemsize]
    return o, message.view(torch.float32)[..., -1]
