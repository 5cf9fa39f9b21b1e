"""FlashInfer's paged MLA (distribution `flashinfer-python`) as attention operations.

Its planner runs on the host: a step's lengths are read back once, before the first layer, so a step cannot be
captured with it, and `auto` never chooses it. It addresses a pool with 32 bits and refuses larger ones. Its causal rule
refuses rows shorter than the group, so a group sees what all its tokens may see, and the rest comes in afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3_kernels.backends.windowed import WindowedPlan, corrected, windowed_plan
from k3_kernels.triton.mla_ops import TritonAttention

WORKSPACE_BYTES = 256 << 20
POOL_LIMIT = 1 << 32


class FlashInferAttention(TritonAttention):
    """Decode by FlashInfer; everything else is ours."""

    def __init__(self, n_sms: int, device: torch.device, backend: str = "fa3") -> None:
        """backend: FlashInfer's own name, `fa2` or `fa3`. Raises ImportError without the library."""
        super().__init__(n_sms, hopper=True)
        from flashinfer import mla  # pyright: ignore[reportMissingImports]

        self.library = mla
        self.backend = backend
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def plan(  # type: ignore[override]
        self, page_table_BW: Tensor, bound_T: Tensor, group: int, max_bound: int, page_tokens: int
    ) -> WindowedPlan:
        """Lengths for the library; its own plan follows at the first decode."""
        del max_bound
        return windowed_plan(page_table_BW, bound_T, group, page_tokens, causal=False)

    def decode(  # type: ignore[override]
        self, q_THK: Tensor, cache_PTK: Tensor, plan: WindowedPlan, scale: float, value_width: int
    ) -> tuple[Tensor, Tensor]:
        """Absorbed attention of verify groups: o [T, H, C], lse [T, H] float32, natural log."""
        pool = cache_PTK.shape[0] * cache_PTK.stride(0)
        if pool > POOL_LIMIT:
            raise ValueError(
                f"a latent pool of {pool} elements: FlashInfer addresses {POOL_LIMIT}; set backends.attention=triton"
            )
        q = q_THK.contiguous()
        key = (q.shape[1], q.dtype, scale)
        if key not in plan.kept:
            plan.kept[key] = self._planned(q, cache_PTK, plan, scale, value_width)
        wrapper: Any = plan.kept[key]
        o, lse = wrapper.run(
            query=q, kv_cache=cache_PTK, return_lse=True, return_lse_base_on_e=True
        )
        lse_BGH = lse.unflatten(0, (-1, plan.group))
        return corrected(q, cache_PTK, plan, scale, o, lse_BGH)

    def _planned(
        self, q: Tensor, cache: Tensor, plan: WindowedPlan, scale: float, value_width: int
    ) -> object:
        length = plan.length_B.cpu()
        pages = -(-length // plan.page_tokens)
        n_rows = length.shape[0]
        ends = torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
        table = plan.page_table_BW.cpu()
        used = torch.cat([table[b, : int(n)] for b, n in enumerate(pages)])
        wrapper = self.library.BatchMLAPagedAttentionWrapper(self.workspace, backend=self.backend)
        wrapper.plan(
            metadata=self.library.MLAPlanMetadata.csr(
                torch.arange(n_rows + 1, dtype=torch.int32) * plan.group, ends, used, length
            ),
            num_heads=q.shape[1],
            head_dim_ckv=value_width,
            head_dim_kpe=q.shape[-1] - value_width,
            page_size=plan.page_tokens,
            causal=plan.causal,
            sm_scale=scale,
            q_data_type=q.dtype,
            kv_data_type=cache.dtype,
            lse_mode="basee",
        )
        return wrapper
