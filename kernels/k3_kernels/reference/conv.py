"""Causal depthwise convolution over the last w tokens, then SiLU: the short convolution of KDA layers.

The window kept between tokens is the last w - 1 inputs, oldest first, zeros before the first token.
A verify step cannot know how many of its tokens will stay, so it keeps k more: window ++ tail holds
w - 1 + k inputs and columns `a .. a + w - 2` of it are the window after `a` accepted drafts.

Letters: T tokens, B rows, G group tokens, H heads, S sections (q, k, v), D head dim, X inputs kept,
w convolution width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.reference.precision import wide


def _filter(inputs_HSDX: Tensor, weight_HSDw: Tensor) -> Tensor:
    """Silu of the convolution over the last axis; w - 1 shorter than the inputs, wide dtype."""
    u = inputs_HSDX.to(wide(inputs_HSDX.dtype))
    weight = weight_HSDw.to(u.dtype).unsqueeze(-1)
    width = weight_HSDw.shape[-1]
    n = u.shape[-1] - width + 1
    y = weight[..., 0, :] * u[..., :n]
    for tap in range(1, width):
        y.addcmul_(weight[..., tap, :], u[..., tap : tap + n])
    return torch.nn.functional.silu(y)


def chunk(u_THSD: Tensor, weight_HSDw: Tensor, window_HSDX: Tensor) -> tuple[Tensor, Tensor]:
    """One request's chunk, continuing from `window_HSDX` (w - 1 inputs).

    Returns y [T, H, S, D] in the wide dtype and the next window in u's dtype.
    """
    u = torch.cat((window_HSDX.to(u_THSD.dtype), u_THSD.permute(1, 2, 3, 0)), -1)
    y = _filter(u, weight_HSDw)
    kept = weight_HSDw.shape[-1] - 1
    return y.permute(3, 0, 1, 2), u[..., u.shape[-1] - kept :]


def verify(
    u_BGHSD: Tensor,
    weight_HSDw: Tensor,
    windows: Tensor,
    tails: Tensor,
    slots_B: Tensor,
    read_column_B: Tensor,
) -> Tensor:
    """One group per row. Returns y [B, G, H, S, D] (wide); overwrites the rows' windows and tails.

    windows: [slots, H, S, D, w - 1]; tails: [slots, H, S, >= G - 1, D]; the read starts at
    `read_column_B` (-1: the slot was just filled, as 0), the write leaves column 0 = after the anchor.
    """
    kept = weight_HSDw.shape[-1] - 1
    n_rows, group = u_BGHSD.shape[:2]
    u = u_BGHSD.permute(0, 2, 3, 4, 1)
    old = windows.index_select(0, slots_B)
    if tails.shape[-2]:
        old = torch.cat((old, tails.index_select(0, slots_B).transpose(-1, -2)), -1)
        offsets = torch.arange(kept, device=u.device)
        column = read_column_B.clamp(min=0).view(-1, 1) + offsets  # [B, w - 1]
        old = old.gather(-1, column.view(n_rows, 1, 1, 1, kept).expand(*old.shape[:4], kept))
    u = torch.cat((old.to(u.dtype), u), -1)
    windows.index_copy_(0, slots_B, u[..., 1 : kept + 1].to(windows.dtype))
    if group > 1:
        rest = u[..., kept + 1 :].transpose(-1, -2)
        tails[:, :, :, : group - 1].index_copy_(0, slots_B, rest.to(tails.dtype))
    return _filter(u, weight_HSDw).permute(0, 4, 1, 2, 3)
