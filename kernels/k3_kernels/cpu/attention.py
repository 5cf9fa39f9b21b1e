"""Latent attention of verify groups on CPUs by the native library; that of chunks is in `chunk_ops.py`.

Rules of `k3_kernels.reference.mla`. Other dtypes than float32 and float64 go to the reference.
"""

from __future__ import annotations

from torch import Tensor

from k3_kernels.cpu.calls import DTYPES, pair, rows
from k3_kernels.cpu.chunk_ops import NativePrefill
from k3_kernels.cpu.layer_ops import NativeMlaBlock, are_packed
from k3_kernels.cpu.plan import NativePlan
from k3_kernels.layers import MlaLayer
from k3_kernels.reference import message, mla


class NativeAttention(NativePrefill):
    """`api.AttentionOps`."""

    plan = staticmethod(NativePlan.of)
    pack = staticmethod(message.pack)
    merge_packed = staticmethod(message.merge_packed)

    def __init__(self) -> None:
        """Raises LibraryError."""
        super().__init__()
        self._write, self._decode = pair("k3_mla_write"), pair("k3_mla_decode")

    def write(self, cache_PTK: Tensor, slot_T: Tensor, latent_TK: Tensor) -> None:
        """`reference.mla.write`."""
        cache = cache_PTK
        if cache.dtype not in DTYPES or latent_TK.dtype != cache.dtype or cache.stride(2) != 1:
            mla.write(cache, slot_T, latent_TK)
            return
        latent, slot = rows(latent_TK), slot_T.contiguous()
        self._write[cache.dtype](
            *(cache.data_ptr(), cache.stride(0), cache.stride(1), slot.data_ptr()),
            *(cache.shape[1], latent.data_ptr(), latent.stride(0), *latent.shape),
        )

    def decode(
        self, q_THK: Tensor, cache_PTK: Tensor, plan: NativePlan, scale: float, value_width: int
    ) -> tuple[Tensor, Tensor]:
        """`reference.mla.decode`."""
        cache, q = cache_PTK, rows(q_THK)
        if q.dtype not in DTYPES or cache.dtype != q.dtype or cache.stride(2) != 1:
            return mla.decode(q_THK, cache, plan.plain(), scale, value_width)
        n_tokens, n_heads, width = q.shape
        table, bound = plan.table, plan.bound
        o, lse = q.new_empty(n_tokens, n_heads, value_width), q.new_empty(n_tokens, n_heads)
        self._decode[q.dtype](
            *(q.data_ptr(), q.stride(0), q.stride(1)),
            *(cache.data_ptr(), cache.stride(0), cache.stride(1)),
            *(table.data_ptr(), table.stride(0), bound.data_ptr(), o.data_ptr(), lse.data_ptr()),
            *(table.shape[0], plan.group, n_heads, width, value_width, cache.shape[1], scale),
        )
        return o, lse

    def block(self, layer: MlaLayer) -> NativeMlaBlock | None:
        """One call for a whole layer, where its projections are packed."""
        if not are_packed(layer.entry, layer.query_up, layer.out):
            return None
        return NativeMlaBlock(layer)
