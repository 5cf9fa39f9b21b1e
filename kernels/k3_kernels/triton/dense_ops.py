"""What surrounds the other kernels on GPUs: torch's matrix products, norms and activations in one launch each.

A drafter's block, context rows and drafts, and the judgement of greedy groups, likewise in few (`k3_kernels.drafts`), and tokens drawn in one (`k3_kernels.draws`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.api import BackendError, Projection
from k3_kernels.drafts import (
    AnyContext,
    AnyLayer,
    DeriveTables,
    DraftRotation,
    DraftRows,
    GreedyJudge,
    HeadContext,
    HeadLayer,
    RingBlock,
)
from k3_kernels.draws import Draw
from k3_kernels.layers import DraftHead, DraftLayer
from k3_kernels.triton import draft_heads, norm
from k3_kernels.triton.draft_attend import TritonDraftBlock, fits
from k3_kernels.triton.draft_rows import TritonDraftRows
from k3_kernels.triton.draft_tokens import TritonDraftTokens
from k3_kernels.triton.draw import draw
from k3_kernels.triton.judge import judge
from k3_kernels.triton.products import Product
from k3_kernels.triton.tables import derive

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonDense:
    """`DenseOps`."""

    rms_norm = staticmethod(norm.rms_norm)
    gated_rms_norm = staticmethod(norm.gated_rms_norm)
    gate = staticmethod(norm.gate)
    situ = staticmethod(norm.situ)

    def projection(self, weight_OI: Tensor) -> Projection:
        """Torch's own product, rows aligned. Raises BackendError for float64, which norms here do not compute in."""
        if weight_OI.dtype not in DTYPES:
            raise BackendError(
                f"backends.kda=triton: weights of {weight_OI.dtype}: expected one of {', '.join(map(str, DTYPES))}; "
                "set backends.kda=reference"
            )
        return Product.of(weight_OI)

    def ring_block(self, layer: AnyLayer, rotation: DraftRotation) -> RingBlock | None:
        """Layers whose heads fit a program's tiles."""
        match layer:
            case DraftLayer() if fits(layer):
                return TritonDraftBlock(layer, rotation)
            case HeadLayer() if draft_heads.fits(layer):
                return draft_heads.TritonHeadBlock(layer, rotation)
            case _:
                return None

    def draft_rows(self, context: AnyContext) -> DraftRows:
        """Any."""
        if isinstance(context, HeadContext):
            return draft_heads.TritonHeadRows(context)
        return TritonDraftRows(context)

    def draft_tokens(self, head: DraftHead) -> TritonDraftTokens:
        """Any."""
        return TritonDraftTokens(head)

    def greedy_judge(self) -> GreedyJudge:
        """In the model's dtype; no float64."""
        return judge

    def draw(self) -> Draw:
        """Of bfloat16, float16 and float32 scores."""
        return draw

    def derive_tables(self) -> DeriveTables:
        """Any."""
        return derive
