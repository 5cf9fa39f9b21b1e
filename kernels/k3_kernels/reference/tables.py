"""Per-token tables of a verify step, derived from the device row table alone.

Position `pos` belongs to super-block `pos // (P * C)`; inside it page `off // P` lies on context rank
`off // P`. Everything is recomputed by overwriting; nothing is carried from step to step.
Letters: P tokens per page, C context ranks, B rows, G group tokens, T = B * G, W page-table width.
Golden: helix/closed_forms.json, helix/verify_groups.json.
"""

from __future__ import annotations

import torch
from torch import Tensor


def local_len(n: Tensor, page_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    """Tokens of the first `n` global tokens that lie on `cp_rank`; same shape and dtype as `n`."""
    block = page_tokens * cp_size
    full = torch.div(n, block, rounding_mode="floor")
    return full * page_tokens + (n - full * block - cp_rank * page_tokens).clamp(0, page_tokens)


def verify_tables(
    base_B: Tensor,
    page_table_BW: Tensor,
    valid_BG: Tensor,
    page_tokens: int,
    cp_size: int,
    cp_rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, pool slots and bounds of every group token on this rank.

    base_B: anchor positions, int; valid_BG: False for padding tokens, which get slot -1 and bound 0.
    A position beyond the table, or on a page of -1, gets slot -1.
    Returns position [T] int64, slot [T] int64 (-1: not this rank's), bound [T] int32.
    """
    group = valid_BG.shape[1]
    block = page_tokens * cp_size
    position = base_B.to(torch.int64).unsqueeze(1) + torch.arange(group, device=base_B.device)
    super_block = torch.div(position, block, rounding_mode="floor")
    offset = position - super_block * block
    width = page_table_BW.shape[1]
    page = page_table_BW.to(torch.int64).gather(1, super_block.clamp(max=width - 1))
    mine = torch.div(offset, page_tokens, rounding_mode="floor") == cp_rank
    pool_slot = page * page_tokens + offset % page_tokens
    writable = mine & valid_BG & (page >= 0) & (super_block < width)
    slot = torch.where(writable, pool_slot, -1)
    bound = local_len(position + 1, page_tokens, cp_size, cp_rank)
    bound = torch.where(valid_BG, bound, 0).to(torch.int32)
    return position.flatten(), slot.flatten(), bound.flatten()
