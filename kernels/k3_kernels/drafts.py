"""What speculation consists of between matrix products, for backends that do it where the data lies.

A backend offers it by methods of its dense operations; `ring_block`, `draft_rows` and so on ask for it at load and give
None where there is none: then the same is done part by part with torch. Everything reads the device's row table and the
drafter's ring as they are, and nothing waits for the host. The judgement may have a slice of the vocabulary (`Slices`); the
rest is for one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from k3_kernels.layers import DraftLayer, Projection, Slices


@dataclass(frozen=True, slots=True)
class DraftRotation:
    """Of `dim` channels at positions. frequencies: [dim / 2], of the precision the model rotates in. amplitude: factor of cosine and sine."""

    frequencies: Tensor
    amplitude: float
    dim: int
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Of a drafter with latent attention: taps -> context, and of each layer context -> latent and shared key."""

    projection: Projection
    norm: Tensor
    entries: tuple[Projection, ...]
    latent_norms: tuple[Tensor, ...]
    rotation: DraftRotation
    eps: float


@dataclass(frozen=True, slots=True)
class HeadContext:
    """Of a drafter with grouped-query attention: taps -> context, and of each layer context -> keys, and values."""

    projection: Projection
    norm: Tensor
    keys: tuple[Projection, ...]
    values: tuple[Projection, ...]
    key_norms: tuple[Tensor, ...]
    rotation: DraftRotation
    eps: float


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """Of a drafter with grouped-query attention."""

    input_norm: Tensor
    query: Projection
    query_norm: Tensor
    key: Projection
    value: Projection
    key_norm: Tensor
    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    eps: float


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """A ring, pool [slots * places, L, P, W] or [slots * places, H, L, 2, P, E], and the slot of each row of the table. window: positions that are read."""

    pool: Tensor
    places: int
    window: int
    slot_R: Tensor


@dataclass(frozen=True, slots=True)
class DraftView:
    """What blocks with anchors at `base` see of a ring: positions from `start`, at most the window.

    Of equal strides. max_base: upper bound of every base.
    """

    place: DraftPlace
    slot_B: Tensor
    start_B: Tensor
    base_B: Tensor
    max_base: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """Groups that began at `start`, of rows of the table (0: nobody's), and how many of their drafts were accepted."""

    rows_B: Tensor
    start_B: Tensor
    accepted_B: Tensor


@dataclass(frozen=True, slots=True)
class RowWords:
    """Where groups began, and the words of the row table that follow from a verdict."""

    start_B: Tensor
    base_R: Tensor
    anchor_R: Tensor
    column_R: Tensor


@dataclass(frozen=True, slots=True)
class RowSource:
    """Rows of the table that take part in a step, at most `limits` drafts of each, and what the table says.

    pages_BW: their page tables. Of page `page` tokens `page_tokens` on each of `cp_size` ranks.
    """

    rows_B: Tensor
    limits_B: Tensor
    base_R: Tensor
    anchor_R: Tensor
    draft_len_R: Tensor
    column_R: Tensor
    drafts_RK: Tensor
    pages_BW: Tensor
    page_tokens: int
    cp_size: int
    cp_rank: int


@dataclass(frozen=True, slots=True)
class GroupTables:
    """What is overwritten for a step: per token, then per row."""

    tokens_T: Tensor
    slot_T: Tensor
    bound_T: Tensor
    next_T: Tensor
    base_B: Tensor
    column_B: Tensor
    draft_len_B: Tensor


class DeriveTables(Protocol):
    """The batch of a step."""

    def __call__(self, source: RowSource, to: GroupTables, group: int) -> None:
        """Groups of `group` tokens."""
        ...


class RingBlock(Protocol):
    """A drafter's layer over its ring."""

    def takes(self, n_rows: int, n_slots: int) -> bool:
        """Whether it is for calls of so many blocks of so many slots; others are computed part by part."""
        ...

    def __call__(self, x_BKD: Tensor, view: DraftView, index: int) -> Tensor:
        """[B, K, D] -> the residual after layer `index`."""
        ...


class ContextRows(Protocol):
    """Context rows of committed tokens."""

    def __call__(self, taps_TXD: Tensor, position_T: Tensor) -> Tensor:
        """[T, L, W]."""
        ...


class DraftRows(Protocol):
    """Context rows of a step."""

    def __call__(self, taps_TXD: Tensor, accepted: Accepted, place: DraftPlace) -> None:
        """Store those of the anchor and the accepted drafts."""
        ...


class GreedyJudge(Protocol):
    """Greedy groups, from logits as the model has them or wider."""

    def __call__(
        self,
        logits_BGV: Tensor,
        drafts_BK: Tensor,
        draft_len_B: Tensor,
        rows_B: Tensor,
        words: RowWords,
    ) -> Tensor:
        """Tokens and accepted drafts, [B, G + 1]; the rows go on behind what was accepted."""
        ...


AnyLayer = DraftLayer | HeadLayer
AnyContext = DraftContext | HeadContext


@runtime_checkable
class _Ring(Protocol):
    def ring_block(self, layer: AnyLayer, rotation: DraftRotation) -> RingBlock | None: ...

    def draft_rows(self, context: AnyContext) -> DraftRows | None: ...

    def greedy_judge(self) -> GreedyJudge: ...

    def derive_tables(self) -> DeriveTables: ...


@runtime_checkable
class _SlicedJudge(Protocol):
    def over(self, slices: Slices) -> GreedyJudge: ...


@runtime_checkable
class _Context(Protocol):
    def context_rows(self, context: DraftContext) -> ContextRows | None: ...


def context_rows(ops: object, context: AnyContext) -> ContextRows | None:
    """Rows of all layers as one operation, for latent attention."""
    if isinstance(ops, _Context) and isinstance(context, DraftContext):
        return ops.context_rows(context)
    return None


def ring_block(ops: object, layer: AnyLayer, rotation: DraftRotation) -> RingBlock | None:
    """The layer over the ring."""
    return ops.ring_block(layer, rotation) if isinstance(ops, _Ring) else None


def draft_rows(ops: object, context: AnyContext) -> DraftRows | None:
    """Context rows from taps into the ring."""
    return ops.draft_rows(context) if isinstance(ops, _Ring) else None


def greedy_judge(ops: object, slices: Slices | None = None) -> GreedyJudge | None:
    """Argmax, verdict and the rows' update. slices: for a rank that has logits of its own slice alone."""
    judge = ops.greedy_judge() if isinstance(ops, _Ring) else None
    if slices is None:
        return judge
    return judge.over(slices) if isinstance(judge, _SlicedJudge) else None


def derive_tables(ops: object) -> DeriveTables | None:
    """A step's tables from the rows'."""
    return ops.derive_tables() if isinstance(ops, _Ring) else None
