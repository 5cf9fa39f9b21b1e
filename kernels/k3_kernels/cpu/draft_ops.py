"""What speculation consists of between the model's layers, as few calls: `k3_kernels.drafts` by the native library.

For latent attention and heads without a state; other drafters are computed part by part. Rules: `k3.model.dspark`.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, byref

import torch
from torch import Tensor

from k3_kernels.cpu import blocks, library
from k3_kernels.cpu.calls import pair, rows
from k3_kernels.cpu.dense import NativeDense, most_tokens
from k3_kernels.cpu.draw_ops import NativeDraw
from k3_kernels.cpu.layer_ops import are_packed, packed
from k3_kernels.drafts import (
    Accepted,
    AnyContext,
    AnyLayer,
    DraftContext,
    DraftPlace,
    DraftRotation,
    DraftView,
    GroupTables,
    RowSource,
    RowWords,
)
from k3_kernels.layers import DraftHead, DraftLayer
from k3_kernels.reference.precision import wide


class NativeDraft(NativeDense):
    """`api.DenseOps`, and what speculation needs."""

    def context_rows(self, context: DraftContext) -> NativeContext | None:
        """One call for the rows of all layers, where all projections are packed."""
        if not are_packed(context.projection, *context.entries):
            return None
        return NativeContext(context)

    def draft_rows(self, context: AnyContext) -> NativeDraftRows | None:
        """The same into the ring."""
        if not isinstance(context, DraftContext):
            return None
        made = self.context_rows(context)
        return None if made is None else NativeDraftRows(made)

    def ring_block(self, layer: AnyLayer, rotation: DraftRotation) -> NativeRingBlock | None:
        """One call for a layer, where its projections are packed."""
        if not isinstance(layer, DraftLayer):
            return None
        queries = (layer.query_down, layer.query_up)
        if not are_packed(*queries, layer.entry, layer.out, layer.gate_up, layer.down):
            return None
        return NativeRingBlock(layer, rotation)

    def draft_tokens(self, head: DraftHead) -> NativeDraftTokens | None:
        """One call for the drafts of a block, where the head's output is packed."""
        return NativeDraftTokens(head) if are_packed(head.out) else None

    def greedy_judge(self) -> NativeJudge:
        """In float32 and float64."""
        return NativeJudge()

    def derive_tables(self) -> NativeDerive:
        """Any."""
        return NativeDerive()

    def draw(self) -> NativeDraw:
        """From scores of any floating dtype."""
        return NativeDraw()


def _check(own: torch.dtype, **floats: Tensor) -> None:
    """What is computed with must be of the weights' dtype. Our own mistakes."""
    for name, x in floats.items():
        assert x.dtype == own, f"{name} {x.dtype}, weights {own}"


def _words(*words: Tensor) -> Sequence[int]:
    """Addresses of dense int64 vectors."""
    for x in words:
        assert x.dtype == torch.int64, f"words of {x.dtype}"
        assert x.dim() == 1, f"words {tuple(x.shape)}"
        assert x.stride(0) == 1 or len(x) == 1, f"words: strides {x.stride()}"
    return [x.data_ptr() for x in words]


class NativeContext:
    """`drafts.ContextRows`."""

    def __init__(self, what: DraftContext) -> None:
        """Raises LibraryError."""
        norms, projection, rotation = what.latent_norms, packed(what.projection), what.rotation
        assert projection is not None, "the projection is packed"
        pairs = zip(map(packed, what.entries), norms, strict=True)
        parts = [blocks.DraftRows(blocks.Matrix.of(m), norm.data_ptr()) for m, norm in pairs]
        width = norms[0].shape[0] + rotation.dim
        assert all(part.entry.outputs == width for part in parts), f"entries, rows of {width}"
        layers = (blocks.DraftRows * len(parts))(*parts)
        self.structure = blocks.DraftContext(
            *(blocks.Matrix.of(projection), what.norm.data_ptr(), rotation.frequencies.data_ptr()),
            *(addressof(layers), len(parts), norms[0].shape[0], rotation.dim),
            *(rotation.is_interleaved, what.eps, rotation.amplitude),
        )
        self._kept = (what, layers)
        self.dtype, self._inputs = norms[0].dtype, projection.inputs
        self._shape = (len(parts), width)
        self._call = pair("k3_draft_context")[self.dtype]
        _check(self.dtype, frequencies=rotation.frequencies)

    def taps(self, taps_TXD: Tensor) -> Tensor:
        """[T, X * D] with a dense last axis."""
        taps = rows(taps_TXD.flatten(1))
        _check(self.dtype, taps=taps)
        assert taps.shape[1] == self._inputs, f"taps {tuple(taps.shape)}, weights {self._inputs}"
        return taps

    def __call__(self, taps_TXD: Tensor, position_T: Tensor) -> Tensor:
        """[T, L, W]."""
        taps, position = self.taps(taps_TXD), position_T.contiguous()
        y = taps.new_empty(len(taps), *self._shape)
        self._call(
            *(byref(self.structure), taps.data_ptr(), taps.stride(0), *_words(position)),
            *(len(taps), y.data_ptr()),
        )
        return y


class NativeDraftRows:
    """`drafts.DraftRows`."""

    def __init__(self, context: NativeContext) -> None:
        """Raises LibraryError."""
        self._context = context
        self._call = pair("k3_draft_rows")[context.dtype]
        self._ring = Ring(context.dtype)

    def __call__(self, taps_TXD: Tensor, accepted: Accepted, place: DraftPlace) -> None:
        """Store the rows of the anchor and the accepted drafts."""
        taps, n_rows = self._context.taps(taps_TXD), len(accepted.rows_B)
        words, counts = (place.slot_R, accepted.rows_B, accepted.start_B), accepted.accepted_B
        assert counts.dtype == torch.int64, f"accepted: {counts.dtype}"
        self._call(
            *(byref(self._context.structure), taps.data_ptr(), taps.stride(0)),
            *(self._ring.of(place), *_words(*words), counts.data_ptr(), counts.stride(0)),
            *(n_rows, len(taps) // n_rows),
        )


class Ring:
    """The structure of the ring that was last seen."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._place: DraftPlace | None = None
        self._structure: Structure = blocks.DraftRing()

    def of(self, place: DraftPlace) -> object:
        """By address, as a call takes it."""
        if place is not self._place:
            _check(self._dtype, ring=place.pool)
            self._place, self._structure = place, blocks.DraftRing.of(place)
        return byref(self._structure)


class NativeRingBlock:
    """`drafts.RingBlock`."""

    def __init__(self, layer: DraftLayer, rotation: DraftRotation) -> None:
        """Raises LibraryError."""
        up, nope = layer.kv_up_HEC, layer.nope
        heads, both, rank = up.shape
        assert up.is_contiguous(), f"up-projections: strides {up.stride()}"
        assert rotation.dim == layer.rope, f"{rotation.dim} rotated, {layer.rope} in the layer"
        queries = (layer.query_down, layer.query_up)
        matrices = map(packed, (*queries, layer.entry, layer.out, layer.gate_up, layer.down))
        norms = (layer.input_norm, layer.query_norm, layer.latent_norm)
        self._structure = blocks.DraftBlock(
            *(blocks.Matrix.of(matrix) for matrix in matrices),
            *(norm.data_ptr() for norm in norms),
            *(up.data_ptr(), up[:, nope:].data_ptr(), layer.mlp_norm.data_ptr()),
            *(rotation.frequencies.data_ptr(), heads, nope, layer.rope, rank, both - nope),
            *(up.stride(0), layer.is_interleaved, layer.scale, layer.eps, rotation.amplitude),
        )
        self._kept, self._dtype = (layer, rotation), up.dtype
        self._size, self._most_tokens = layer.input_norm.shape[0], most_tokens()
        self._call = pair("k3_draft_block")[up.dtype]
        self._ring = Ring(up.dtype)
        _check(up.dtype, frequencies=rotation.frequencies)

    def takes(self, n_rows: int, n_slots: int) -> bool:
        """As other blocks, while the packed product is the faster one."""
        return n_rows * n_slots <= self._most_tokens

    def __call__(self, x_BKD: Tensor, view: DraftView, index: int) -> Tensor:
        """[B, K, D]."""
        x, layers = x_BKD.contiguous(), view.place.pool.shape[1]
        _check(self._dtype, inputs=x)
        assert x.shape[2] == self._size, f"inputs {tuple(x.shape)}, a layer of {self._size}"
        assert index < layers, f"layer {index} of a ring of {layers}"
        y = torch.empty_like(x)
        self._call(
            *(byref(self._structure), x.data_ptr(), self._ring.of(view.place), index),
            *(*_words(view.slot_B, view.start_B, view.base_B), *x.shape[:2], y.data_ptr()),
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


class NativeJudge:
    """`drafts.GreedyJudge`."""

    def __init__(self) -> None:
        """Raises LibraryError."""
        self._calls = pair("k3_judge")

    def __call__(
        self,
        logits_BGV: Tensor,
        drafts_BK: Tensor,
        draft_len_B: Tensor,
        rows_B: Tensor,
        words: RowWords,
    ) -> Tensor:
        """[B, G + 1]."""
        logits = logits_BGV.to(wide(logits_BGV.dtype)).contiguous()
        n_rows, group, _ = logits.shape
        assert drafts_BK.shape == (n_rows, group - 1), f"drafts {tuple(drafts_BK.shape)}"
        assert group == 1 or drafts_BK.stride(1) == 1, f"drafts: strides {drafts_BK.stride()}"
        drawn = rows_B.new_empty(n_rows, group + 1)
        table = _words(words.start_B, words.base_R, words.anchor_R, words.column_R)
        self._calls[logits.dtype](
            *(logits.data_ptr(), drafts_BK.data_ptr(), drafts_BK.stride(0)),
            *(*_words(draft_len_B, rows_B), *table, drawn.data_ptr(), *logits.shape),
        )
        return drawn


class NativeDerive:
    """`drafts.DeriveTables`."""

    def __init__(self) -> None:
        """Raises LibraryError."""
        self._call = library.function("k3_derive")

    def __call__(self, source: RowSource, to: GroupTables, group: int) -> None:
        """Groups of `group` tokens."""
        drafts, pages, n = source.drafts_RK, source.pages_BW, len(source.rows_B)
        assert pages.dtype == to.bound_T.dtype == torch.int32, f"pages of {pages.dtype}"
        assert pages.stride(1) == 1, f"pages: strides {pages.stride()}"
        assert drafts.dtype == torch.int64, f"drafts of {drafts.dtype}"
        assert group == 1 or drafts.stride(1) == 1, f"drafts: strides {drafts.stride()}"
        assert drafts.shape[1] >= group - 1, f"{drafts.shape[1]} drafts for groups of {group}"
        rows_of = (source.rows_B, source.limits_B, source.base_R, source.anchor_R)
        self._call(
            *(*_words(*rows_of, source.draft_len_R, source.column_R), drafts.data_ptr()),
            *(drafts.stride(0), pages.data_ptr(), pages.stride(0), pages.shape[1]),
            *(source.page_tokens, source.cp_size, source.cp_rank, *_words(to.tokens_T, to.slot_T)),
            *(to.bound_T.data_ptr(), *_words(to.next_T, to.base_B, to.column_B, to.draft_len_B)),
            *(n, group),
        )
