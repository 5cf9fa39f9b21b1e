"""FlashMLA's dense Hopper kernel (distribution `sgl-flash-mla`, module `flash_mla`) as attention operations.

It takes bfloat16 or float16, rows of 576 with values of 512, pages of 64 tokens, any number of heads. Its own schedule
is made on the device at a step's first layer and kept for the others, so a step can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.backends.windowed import WindowedPlan, corrected, windowed_plan
from k3_kernels.triton.mla_ops import TritonAttention

WIDTH, VALUE, PAGE = 576, 512, 64


class FlashMlaAttention(TritonAttention):
    """Decode by FlashMLA; everything else is ours."""

    def __init__(self, n_sms: int) -> None:
        """Raises ImportError without the library, RuntimeError when it has no Hopper kernels."""
        super().__init__(n_sms, hopper=True)
        import flash_mla  # pyright: ignore[reportMissingImports]

        if not flash_mla.has_legacy():
            raise RuntimeError("flash_mla was built without its Hopper kernels (dense decoding)")
        self.library = flash_mla

    def plan(  # type: ignore[override]  (a plan is opaque to everybody but the operations that made it)
        self, page_table_BW: Tensor, bound_T: Tensor, group: int, max_bound: int, page_tokens: int
    ) -> WindowedPlan:
        """Lengths for the library; its schedule follows at the first decode."""
        del max_bound
        if page_tokens != PAGE:
            raise ValueError(
                f"page_tokens={page_tokens}: FlashMLA reads pages of {PAGE}; set cache.page_tokens={PAGE} or "
                "backends.attention=triton"
            )
        return windowed_plan(page_table_BW, bound_T, group, page_tokens, causal=True)

    def decode(  # type: ignore[override]
        self, q_THK: Tensor, cache_PTK: Tensor, plan: WindowedPlan, scale: float, value_width: int
    ) -> tuple[Tensor, Tensor]:
        """Absorbed attention of verify groups: o [T, H, C], lse [T, H] float32, natural log."""
        _, heads, width = q_THK.shape
        if (width, value_width) != (WIDTH, VALUE):
            raise ValueError(
                f"latent rows of {width} with values of {value_width}: FlashMLA is built for {WIDTH} and "
                f"{VALUE}; set backends.attention=triton"
            )
        q = q_THK.contiguous().unflatten(0, (-1, plan.group))
        schedule = plan.kept.setdefault((heads,), self.library.get_mla_metadata()[0])
        o, lse_BHG = self.library.flash_mla_with_kvcache(
            q,
            cache_PTK.unsqueeze(2),
            plan.page_table_BW,
            plan.length_B,
            value_width,
            schedule,
            softmax_scale=scale,
            causal=plan.causal,
            use_legacy=True,
        )
        return corrected(q.flatten(0, 1), cache_PTK, plan, scale, o.flatten(0, 1), lse_BHG.mT)


def supports(width: int, value_width: int, page_tokens: int, dtype: torch.dtype) -> bool:
    """Whether FlashMLA can take such a model."""
    return (width, value_width, page_tokens) == (WIDTH, VALUE, PAGE) and dtype in (
        torch.bfloat16,
        torch.float16,
    )
