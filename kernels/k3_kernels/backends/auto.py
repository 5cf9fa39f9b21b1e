"""Attention by the fastest backend of a shape, from a table measured on the card.

The table is `benchmarks/kernels.py --sections mla` on an H200 (`benchmarks/results`): our kernel where keys are read
faster than they are used, FlashMLA where the matrix units are the limit. Without FlashMLA everything is ours.

Letters: T tokens, B rows, H heads, W pages of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from k3_kernels.backends.flashmla import FlashMlaAttention, supports
from k3_kernels.triton.mla_ops import TritonAttention

# (at most so many queries per key, at least so many keys over all rows) -> FlashMLA is faster.
FLASHMLA_FROM = ((16, 1 << 62), (1 << 62, 1 << 15))


@dataclass(slots=True)
class AutoPlan:
    """A step's tables; the plan of the backend that the first layer's shape asks for."""

    tables: tuple[Tensor, Tensor, int, int, int]  # as given to `plan`
    n_keys: int
    plans: dict[bool, Any] = field(default_factory=dict[bool, Any])


def installed_flashmla(n_sms: int) -> FlashMlaAttention | None:
    """The library, or None where it is not installed or lacks kernels for this GPU."""
    try:
        return FlashMlaAttention(n_sms)
    except (ImportError, RuntimeError):
        return None


def prefers_flashmla(n_queries: int, n_keys: int) -> bool:
    """n_queries: heads times group tokens; n_keys: host's bound of all rows' keys."""
    return next(n_keys >= least for most, least in FLASHMLA_FROM if n_queries <= most)


class AutoAttention(TritonAttention):
    """Ours and, where it can be imported, FlashMLA."""

    def __init__(self, n_sms: int, flashmla: FlashMlaAttention | None, *, hopper: bool) -> None:
        """flashmla: None where it is not installed or not of use."""
        super().__init__(n_sms, hopper=hopper)
        self.flashmla = flashmla

    def plan(  # type: ignore[override]
        self, page_table_BW: Tensor, bound_T: Tensor, group: int, max_bound: int, page_tokens: int
    ) -> AutoPlan:
        """Which backend, and so which plan, is known at the first decode."""
        tables = (page_table_BW, bound_T, group, max_bound, page_tokens)
        return AutoPlan(tables, max_bound * page_table_BW.shape[0])

    def decode(  # type: ignore[override]
        self, q_THK: Tensor, cache_PTK: Tensor, plan: AutoPlan, scale: float, value_width: int
    ) -> tuple[Tensor, Tensor]:
        """Absorbed attention of verify groups: o [T, H, C], lse [T, H] float32, natural log."""
        _, _, group, _, page_tokens = plan.tables
        by_library = (
            self.flashmla is not None
            and supports(q_THK.shape[-1], value_width, page_tokens, q_THK.dtype)
            and prefers_flashmla(q_THK.shape[1] * group, plan.n_keys)
        )
        ops = self.flashmla if by_library and self.flashmla is not None else super()
        if by_library not in plan.plans:
            plan.plans[by_library] = ops.plan(*plan.tables)
        return ops.decode(q_THK, cache_PTK, plan.plans[by_library], scale, value_width)
