"""What context ranks send each other: one message of a head's output bytes beside those of its log-sum-exp.

Outputs go as latents, or projected to values first, which sends C / V times fewer bytes; a merge is linear, so both
give the same. Letters: R ranks or messages, T tokens, H heads, C latent width, V value dims, X latent or value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.reference import lse
from k3_kernels.reference.precision import wide


def pack(o_THC: Tensor, lse_TH: Tensor, value_up_HCV: Tensor | None, n_messages: int = 1) -> Tensor:
    """Heads in equal shares, one message each: [R, T, H / R, bytes] uint8, R = `n_messages`. lse is wide.

    With `value_up_HCV` the output is projected first.
    """
    o = o_THC
    if value_up_HCV is not None:
        o = torch.bmm(o_THC.transpose(0, 1), value_up_HCV).transpose(0, 1)
    parts = (o.contiguous(), lse_TH.contiguous().unsqueeze(-1))
    message = torch.cat([part.view(torch.uint8) for part in parts], -1)
    return message.unflatten(1, (n_messages, -1)).movedim(1, 0).contiguous()


def merge_packed(message_RTHb: Tensor, dtype: torch.dtype) -> Tensor:
    """The union of the partials of several messages [R, T, H, bytes], any strides but the last: o [T, H, X] in `dtype`."""
    o_bytes = message_RTHb.shape[-1] - wide(dtype).itemsize
    o = message_RTHb[..., :o_bytes].contiguous().view(dtype)
    log_sum = message_RTHb[..., o_bytes:].contiguous().view(wide(dtype)).squeeze(-1)
    return lse.merge(o, log_sum)[0]
