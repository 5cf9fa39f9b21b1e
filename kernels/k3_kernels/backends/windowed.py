"""Per-token bounds for libraries that know only a length per row: one pass of theirs, then `mla_window.correct`.

Letters: T tokens, B rows, G group tokens, H heads, C latent width, K = C + R, W pages of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
import triton
from torch import Tensor

from k3_kernels.triton.mla_window import correct, reach


@dataclass(slots=True)
class WindowedPlan:
    """A step's pages and bounds, the length per row given to the library, and what the library keeps for the step."""

    page_table_BW: Tensor  # int32, -1 replaced by 0: a library may read the first page of any row
    bound_T: Tensor
    length_B: Tensor
    group: int
    page_tokens: int
    causal: bool
    kept: dict[tuple[object, ...], object] = field(default_factory=dict[tuple[object, ...], object])


def windowed_plan(
    page_table_BW: Tensor, bound_T: Tensor, group: int, page_tokens: int, causal: bool
) -> WindowedPlan:
    """On the device, without a host read. causal: which rule the library follows inside a group."""
    n_rows = page_table_BW.shape[0]
    length_B = torch.empty(n_rows, dtype=torch.int32, device=bound_T.device)
    constants = cast(
        "dict[str, Any]",
        {
            "G": group,
            "CAUSAL": causal,
            "BLOCK_B": triton.next_power_of_2(n_rows),
            "BLOCK_G": triton.next_power_of_2(group),
        },
    )
    reach[(1,)](bound_T, length_B, n_rows, **constants)
    pages = page_table_BW.clamp(min=0).to(torch.int32)
    return WindowedPlan(pages, bound_T, length_B, group, page_tokens, causal)


def corrected(
    q_THK: Tensor,
    cache_PTK: Tensor,
    plan: WindowedPlan,
    scale: float,
    o_THC: Tensor,
    lse_BGH: Tensor,
) -> tuple[Tensor, Tensor]:
    """o (in place) and lse [T, H] as the bounds want them, from the library's answer. lse natural, any strides."""
    n_tokens, heads, value_width = o_THC.shape
    shared = q_THK.shape[-1] - value_width
    lse = torch.empty(n_tokens, heads, dtype=torch.float32, device=q_THK.device)
    constants = cast(
        "dict[str, Any]",
        {
            "H": heads,
            "G": plan.group,
            "CAUSAL": plan.causal,
            "P": plan.page_tokens,
            "C": value_width,
            "R": shared,
            "BLOCK_C": max(16, triton.next_power_of_2(value_width)),
            "BLOCK_R": max(16, triton.next_power_of_2(shared)),
            "M": 16,
            "N": max(16, triton.next_power_of_2(plan.group)),
            "num_warps": 4,
        },
    )
    correct[(n_tokens, triton.cdiv(heads, 16))](
        q_THK,
        cache_PTK,
        plan.page_table_BW,
        plan.bound_T,
        plan.length_B,
        o_THC,
        lse_BGH,
        lse,
        scale,
        cache_PTK.stride(0),
        plan.page_table_BW.stride(0),
        *lse_BGH.stride(),
        **constants,
    )
    return o_THC, lse
