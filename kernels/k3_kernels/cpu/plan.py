"""What all latent attention layers of one step share, in the native library's types."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3_kernels.cpu.calls import rows
from k3_kernels.reference import mla


@dataclass(frozen=True, slots=True)
class NativePlan:
    """table: [B, W] int32 page ids; bound: [T] int32. `plain` makes the reference's plan."""

    table: Tensor
    bound: Tensor
    group: int
    max_bound: int
    page_tokens: int

    @classmethod
    def of(
        cls, page_table_BW: Tensor, bound_T: Tensor, group: int, max_bound: int, page_tokens: int
    ) -> NativePlan:
        """As `reference.mla.plan_decode`."""
        table, bound = rows(page_table_BW.to(torch.int32)), bound_T.to(torch.int32).contiguous()
        return cls(table, bound, group, max_bound, page_tokens)

    def plain(self) -> mla.DecodePlan:
        """For a dtype the library has not."""
        return mla.plan_decode(self.table, self.bound, self.group, self.max_bound, self.page_tokens)
