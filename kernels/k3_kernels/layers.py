"""What a whole layer is made of, for backends that compute one between its norms as one operation.

A backend offers it by a method `block` of its operations (`draft_tokens` for a drafter's drafts; the rest of a drafter is in
`drafts.py`); `kda_block`, `mla_block` and so on ask for it at load and give None where there is none: then the model runs
the layer's parts one by one. Blocks are for verify groups and drafts on one rank; drafts may be of several (`Slices`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from k3_kernels.reference.group import GroupCache, GroupRule
from k3_kernels.reference.moe import ExpertWeights, Routing

Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class KdaLayer:
    """entry: D -> convolution inputs [H, 3, K], output gate or its factor, decay factor, beta, of `widths`."""

    entry: Projection
    widths: tuple[int, int, int, int]
    gate_up: Projection | None
    decay_up: Projection
    rule: GroupRule
    norm: Tensor
    eps: float
    out: Projection


@dataclass(frozen=True, slots=True)
class MlaLayer:
    """entry: D -> latent and shared key, query or its factor, gate, of `widths`. kv_up: [H, N + V, C]."""

    entry: Projection
    widths: tuple[int, ...]
    latent_norm: Tensor
    query_norm: Tensor | None
    query_up: Projection | None
    kv_up_HDC: Tensor
    nope: int
    rope: int
    scale: float
    eps: float
    out: Projection


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """Router, routed experts between `down` and `up` (None: full width), shared experts (None: there are none)."""

    gate_ED: Tensor
    bias_E: Tensor
    rule: Routing
    down: Projection | None
    experts: ExpertWeights
    beta: float
    linear_beta: float | None
    norm: Tensor | None
    eps: float
    up: Projection | None
    shared_gate_up: Projection | None
    shared_down: Projection | None


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """Of a drafter with latent attention. entry: D -> latent and shared key. kv_up: [H, N + V, C]."""

    input_norm: Tensor
    query_down: Projection
    query_norm: Tensor
    query_up: Projection
    entry: Projection
    latent_norm: Tensor
    kv_up_HEC: Tensor
    nope: int
    rope: int
    scale: float
    is_interleaved: bool
    out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    eps: float


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A drafter's sequential head without a state: table [V, R], out: R -> V."""

    table_VR: Tensor
    out: Projection


@dataclass(frozen=True, slots=True)
class Slices:
    """The vocabulary in slices, of which a rank has logits of the one from token `first` on.

    gather: [T, N] -> [T, R * N], those of all ranks.
    """

    first: int
    gather: Callable[[Tensor], Tensor]


ALL = Slices(0, lambda best_TN: best_TN)  # one rank has all of it


class KdaBlock(Protocol):
    """x [T, D] -> what the layer adds, before a sum over ranks; updates the caches."""

    most_tokens: int

    def __call__(
        self, x_TD: Tensor, group: int, cache: GroupCache, slots_B: Tensor, read_column_B: Tensor
    ) -> Tensor:
        """[T, D]."""
        ...


class MlaBlock(Protocol):
    """x [T, D] -> what the layer adds, before a sum over ranks; writes the latents first."""

    most_tokens: int

    def __call__(self, x_TD: Tensor, cache_PTK: Tensor, slot_T: Tensor, plan: object) -> Tensor:
        """[T, D]. plan: of the same backend."""
        ...


class MoeBlock(Protocol):
    """x [T, D] -> [T, D]."""

    most_tokens: int

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Routed and shared experts together."""
        ...


class DraftTokens(Protocol):
    """The best drafts from left to right."""

    def __call__(self, logits_BKV: Tensor, anchor_B: Tensor) -> Tensor:
        """[B, K] int64: of each slot's logits and what the head adds for the token before it.

        Logits as the model has them or wider.
        """
        ...


@runtime_checkable
class _Draft(Protocol):
    def draft_tokens(self, head: DraftHead) -> DraftTokens | None: ...


@runtime_checkable
class _Gate(Protocol):
    def gate(self, gate_ED: Tensor) -> Tensor: ...


@runtime_checkable
class _SlicedTokens(Protocol):
    def over(self, slices: Slices) -> DraftTokens: ...


@runtime_checkable
class _Kda(Protocol):
    def block(self, layer: KdaLayer) -> KdaBlock | None: ...


@runtime_checkable
class _Mla(Protocol):
    def block(self, layer: MlaLayer) -> MlaBlock | None: ...


@runtime_checkable
class _Moe(Protocol):
    def block(self, layer: MoeLayer) -> MoeBlock | None: ...


def kda_block(ops: object, layer: KdaLayer) -> KdaBlock | None:
    """The layer as one operation."""
    return ops.block(layer) if isinstance(ops, _Kda) else None


def mla_block(ops: object, layer: MlaLayer) -> MlaBlock | None:
    """The layer as one operation."""
    return ops.block(layer) if isinstance(ops, _Mla) else None


def moe_block(ops: object, layer: MoeLayer) -> MoeBlock | None:
    """The layer as one operation."""
    return ops.block(layer) if isinstance(ops, _Moe) else None


def gate(ops: object, gate_ED: Tensor) -> Tensor:
    """A router's matrix in the form that this backend chooses experts by, of the same numbers."""
    return ops.gate(gate_ED) if isinstance(ops, _Gate) else gate_ED


def draft_tokens(ops: object, head: DraftHead, slices: Slices | None = None) -> DraftTokens | None:
    """All drafts of a block as one operation. slices: for a rank that has logits of its own slice alone."""
    tokens = ops.draft_tokens(head) if isinstance(ops, _Draft) else None
    if slices is None:
        return tokens
    return tokens.over(slices) if isinstance(tokens, _SlicedTokens) else None
