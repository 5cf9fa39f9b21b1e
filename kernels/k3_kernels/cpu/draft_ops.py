"""A drafter's steps as few calls: its context rows, a whole layer of its block, all greedy drafts. Rules: `k3.model.dspark`.

For latent attention and heads without a state; other drafters are computed part by part.
"""

from __future__ import annotations

from ctypes import addressof

import torch
from torch import Tensor

from k3_kernels.cpu import blocks
from k3_kernels.cpu.calls import pair, rows
from k3_kernels.cpu.dense import NativeDense
from k3_kernels.cpu.layer_ops import NativeBlock, are_packed, packed
from k3_kernels.layers import DraftContextRows, DraftHead, DraftLayer


class NativeDraft(NativeDense):
    """`api.DenseOps`, and a drafter's layers and head."""

    def draft_context(self, rows: DraftContextRows) -> NativeDraftContext | None:
        """One call for the rows of all layers, where all projections are packed."""
        return NativeDraftContext(rows) if are_packed(rows.projection, *rows.entries) else None

    def draft_block(self, layer: DraftLayer) -> NativeDraftBlock | None:
        """One call for a layer, where its projections are packed."""
        queries = (layer.query_down, layer.query_up)
        if not are_packed(*queries, layer.entry, layer.out, layer.gate_up, layer.down):
            return None
        return NativeDraftBlock(layer)

    def draft_tokens(self, head: DraftHead) -> NativeDraftTokens | None:
        """One call for the drafts of a block, where the head's output is packed."""
        return NativeDraftTokens(head) if are_packed(head.out) else None


class NativeDraftBlock(NativeBlock):
    """`layers.DraftBlock`."""

    def __init__(self, layer: DraftLayer) -> None:
        """Raises LibraryError."""
        up, nope = layer.kv_up_HEC, layer.nope
        heads, both, rank = up.shape
        assert up.is_contiguous(), f"up-projections: strides {up.stride()}"
        queries = (layer.query_down, layer.query_up)
        matrices = map(packed, (*queries, layer.entry, layer.out, layer.gate_up, layer.down))
        norms = (layer.input_norm, layer.query_norm, layer.latent_norm)
        structure = blocks.DraftBlock(
            *(blocks.Matrix.of(matrix) for matrix in matrices),
            *(norm.data_ptr() for norm in norms),
            *(up.data_ptr(), up[:, nope:].data_ptr(), layer.mlp_norm.data_ptr()),
            *(heads, nope, layer.rope, rank, both - nope, up.stride(0)),
            *(layer.is_interleaved, layer.scale, layer.eps),
        )
        super().__init__("k3_draft_block", structure, layer, up)
        self._dtype = up.dtype

    def __call__(
        self, x_BKD: Tensor, cos: Tensor, sin: Tensor, context_BNW: Tensor, seen_BM: Tensor
    ) -> Tensor:
        """[B, K, D]."""
        x, context = x_BKD.contiguous(), rows(context_BNW)
        n_rows, group, _ = x.shape
        for name, other in (("inputs", x), ("context", context), ("cosines", cos), ("sines", sin)):
            assert other.dtype == self._dtype, f"{name} {other.dtype}, weights {self._dtype}"
        y, cos, sin, seen = (
            torch.empty_like(x),
            cos.contiguous(),
            sin.contiguous(),
            seen_BM.contiguous(),
        )
        assert seen.dtype == torch.bool, f"seen {seen.dtype}"
        assert seen.shape == (n_rows, context.shape[1] + group), f"seen: {tuple(seen.shape)}"
        self._call(
            *(self._address, x.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            *(context.data_ptr(), context.stride(0), context.stride(1)),
            *(seen.data_ptr(), context.shape[1], n_rows, group, y.data_ptr()),
        )
        return y


class NativeDraftContext(NativeBlock):
    """`layers.DraftContextBlock`."""

    def __init__(self, what: DraftContextRows) -> None:
        """Raises LibraryError."""
        norms, projection = what.latent_norms, packed(what.projection)
        self._width = norms[0].shape[0] + what.rope
        pairs = zip(map(packed, what.entries), norms, strict=True)
        parts = [blocks.DraftRows(blocks.Matrix.of(m), norm.data_ptr()) for m, norm in pairs]
        self._parts = (blocks.DraftRows * len(parts))(*parts)
        structure = blocks.DraftContext(
            *(blocks.Matrix.of(projection), what.norm.data_ptr(), addressof(self._parts)),
            *(len(parts), norms[0].shape[0], what.rope, what.is_interleaved, what.eps),
        )
        super().__init__("k3_draft_context", structure, what, norms[0])
        assert projection is not None, "the projection is packed"
        self._inputs, self._like = projection.inputs, norms[0]

    def __call__(self, taps_TI: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, L, W]."""
        taps, cos, sin = rows(taps_TI), cos.contiguous(), sin.contiguous()
        for name, x in (("taps", taps), ("cosines", cos), ("sines", sin)):
            assert x.dtype == self._like.dtype, f"{name} {x.dtype}, weights {self._like.dtype}"
        assert taps.shape[1] == self._inputs, f"taps {tuple(taps.shape)}, weights {self._inputs}"
        y = taps.new_empty(len(taps), len(self._parts), self._width)
        self._call(
            *(self._address, taps.data_ptr(), taps.stride(0), cos.data_ptr(), sin.data_ptr()),
            *(len(taps), y.data_ptr()),
        )
        return y


class NativeDraftTokens:
    """`layers.DraftTokens`."""

    def __init__(self, head: DraftHead) -> None:
        """Raises LibraryError."""
        self._table = head.table_VR.contiguous()
        matrix = packed(head.out)
        assert matrix is not None, "the output of the head is packed"
        assert matrix.outputs == len(self._table), (
            f"{matrix.outputs} outputs, {len(self._table)} rows"
        )
        self._out = matrix
        self._call = pair("k3_draft_tokens")[self._table.dtype]

    def __call__(self, logits_BKV: Tensor, anchor_B: Tensor) -> Tensor:
        """[B, K] int64."""
        logits, out, table = logits_BKV.contiguous(), self._out, self._table
        assert logits.dtype == table.dtype, f"logits {logits.dtype}, head {table.dtype}"
        assert logits.shape[2] == out.outputs, f"{logits.shape[2]} logits, {out.outputs} tokens"
        anchor = anchor_B.contiguous()
        assert (anchor.dtype, anchor.shape) == (torch.int64, logits.shape[:1]), anchor
        drafts = torch.empty(logits.shape[:2], dtype=torch.int64)
        self._call(
            *(logits.data_ptr(), table.data_ptr(), out.data.data_ptr(), out.is_narrow),
            *(anchor.data_ptr(), drafts.data_ptr(), *logits.shape, table.shape[1]),
        )
        return drafts
