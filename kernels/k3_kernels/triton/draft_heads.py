"""A drafter with grouped-query attention: context rows into its ring, and its layers over the ring.

A program of the block is a key head of one request: the queries of that head's group at every slot look at the block's own
keys and then at the ring's rows that may be looked at; a softmax without a causal mask. Heads are normalised before they
are rotated. Rules: `k3.model.draft_attention.HeadRows` and `HeadAttention`.

Letters: B requests, K slots, L layers, H key heads, M query heads of one, E width of a head, R = M * K queries, S keys of
a tile, P tokens per page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from k3_kernels.drafts import Accepted, DraftPlace, DraftRotation, DraftView, HeadContext, HeadLayer
from k3_kernels.triton import norm
from k3_kernels.triton.draft_attend import KEYS, LOG2_E, SLOTS, swiglu
from k3_kernels.triton.draft_parts import (
    FLOOR,
    Parts,
    brought_in,
    finished,
    n_parts,
    oldest_seen,
    share,
)
from k3_kernels.triton.draft_rows import turned
from k3_kernels.triton.products import weight_of

RESOURCES = {"S": KEYS, "num_warps": 4, "num_stages": 3}
WIDEST, MOST_MEMBERS = 128, 8  # width of a head, query heads of a key head


@triton.jit
def _halves(x_ptr, weight_ptr, inside, e, is_pair, STEP, GAP, E, eps, dtype: tl.constexpr):
    """The pairs of normalised heads [.., E / 2], rounded where `reference.norm.rms_norm` rounds, float32."""
    first = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + GAP, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / E + eps)[:, None]
    weight = tl.load(weight_ptr + e * STEP, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    first = ((first * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + e * STEP + GAP, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    second = ((second * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _write(
    z_ptr,
    norm_ptr,
    frequency_ptr,
    rows_ptr,
    start_ptr,
    accepted_ptr,
    slot_ptr,
    pool_ptr,
    accepted_stride,
    pool_unit,
    pool_head,
    pool_layer,
    pool_value,
    places,
    amplitude,
    eps,
    G: tl.constexpr,
    L: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    STEP: tl.constexpr,
    GAP: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, g = token // G, token % G
    row = tl.load(rows_ptr + b)
    if (row != 0) & (g <= tl.load(accepted_ptr + b * accepted_stride)):
        dtype: tl.constexpr = pool_ptr.dtype.element_ty
        position = tl.load(start_ptr + b) + g
        unit = tl.load(slot_ptr + row) * places + position // P % places
        to = pool_ptr + unit * pool_unit + head * pool_head + layer * pool_layer + position % P * E
        e = tl.arange(0, BLOCK_E)
        is_pair, pair = e < E // 2, (e * STEP)[None, :]
        inside = is_pair[None, :]
        z = z_ptr + (token * L + layer).to(tl.int64) * (2 * H * E) + head * E + pair
        first, second = _halves(
            z, norm_ptr + layer * E, inside, e, is_pair, STEP, GAP, E, eps, dtype
        )
        frequency = tl.load(frequency_ptr + e, mask=is_pair, other=0.0)[None, :]
        first, second = turned(first, second, position, frequency, amplitude)
        tl.store(to + pair, first.to(dtype), mask=inside)
        tl.store(to + pair + GAP, second.to(dtype), mask=inside)
        z += H * E
        to += pool_value
        tl.store(to + pair, tl.load(z, mask=inside), mask=inside)
        tl.store(to + pair + GAP, tl.load(z + GAP, mask=inside), mask=inside)


@triton.jit
def _seen(q_first, q_second, k_first, k_second, v, is_seen, scale, best, total, o):
    """One tile of keys into a running softmax."""
    s = tl.dot(q_first, tl.trans(k_first), input_precision="ieee")
    s = tl.dot(q_second, tl.trans(k_second), s, input_precision="ieee") * scale
    return brought_in(s, v, is_seen, best, total, o)


@triton.jit
def _attend(
    z_ptr,
    query_norm_ptr,
    key_norm_ptr,
    pool_ptr,
    frequency_ptr,
    slot_ptr,
    start_ptr,
    base_ptr,
    o_ptr,
    lse_ptr,
    n_tokens,
    view_stride,
    pool_unit,
    pool_head,
    pool_value,
    places,
    window,
    amplitude,
    scale,
    eps,
    K: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    STEP: tl.constexpr,
    GAP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
):
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    r, k = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    pair, e = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_E)
    is_pair, is_slot = pair < E // 2, k < K
    width: tl.constexpr = (M + 2) * H * E
    base = tl.load(base_ptr + b * view_stride)
    frequency = tl.load(frequency_ptr + pair, mask=is_pair, other=0.0)[None, :]

    is_query = r < K * M
    slot, member = r // M, head * M + r % M
    at = ((b * K + slot) * width + member * E)[:, None] + (pair * STEP)[None, :]
    inside = is_query[:, None] & is_pair[None, :]
    first, second = _halves(
        z_ptr + at, query_norm_ptr, inside, pair, is_pair, STEP, GAP, E, eps, dtype
    )
    first, second = turned(first, second, (base + slot)[:, None], frequency, amplitude)
    q_first, q_second = first.to(dtype), second.to(dtype)

    line = ((b * K + k) * width + (H * M + head) * E)[:, None]
    is_own = is_slot[:, None] & is_pair[None, :]
    own_first, own_second = _halves(
        z_ptr + line + (pair * STEP)[None, :],
        key_norm_ptr,
        is_own,
        pair,
        is_pair,
        STEP,
        GAP,
        E,
        eps,
        dtype,
    )
    own_first, own_second = turned(own_first, own_second, (base + k)[:, None], frequency, amplitude)
    is_value = (e < E)[None, :]
    own = tl.load(z_ptr + line + H * E + e[None, :], mask=is_slot[:, None] & is_value, other=0.0)
    best = tl.full([BLOCK_R], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    o = tl.zeros([BLOCK_R, BLOCK_E], tl.float32)
    best, total, o = _seen(
        q_first,
        q_second,
        own_first.to(dtype),
        own_second.to(dtype),
        own,
        is_slot & (part == 0),
        scale,
        best,
        total,
        o,
    )

    oldest = oldest_seen(tl.load(start_ptr + b * view_stride), base, window)
    ring = tl.load(slot_ptr + b * view_stride) * places
    start, end = share(oldest, base, part, S, PARTS)
    for at in range(start, end, S):
        key = at + tl.arange(0, S)
        is_seen = key < end
        rows = (ring + key // P % places) * pool_unit + head * pool_head + key % P * E
        keys = pool_ptr + rows[:, None] + (pair * STEP)[None, :]
        is_read = is_seen[:, None] & is_pair[None, :]
        k_first = tl.load(keys, mask=is_read, other=0.0)
        k_second = tl.load(keys + GAP, mask=is_read, other=0.0)
        values = pool_ptr + rows[:, None] + pool_value + e[None, :]
        v = tl.load(values, mask=is_seen[:, None] & is_value, other=0.0)
        best, total, o = _seen(
            q_first, q_second, k_first, k_second, v, is_seen, scale, best, total, o
        )
    line = (part * n_tokens + b * K + slot) * (H * M) + member
    o = finished(o, total).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + line[:, None] * E + e[None, :], o, mask=is_query[:, None] & is_value)
    if PARTS > 1:
        tl.store(lse_ptr + line, best + tl.log2(tl.maximum(total, 1e-30)), mask=is_query)


def _pairs(rotation: DraftRotation) -> tuple[int, int]:
    """Channels from one pair to the next, and from its first to its second."""
    return (2, 1) if rotation.is_interleaved else (1, rotation.dim // 2)


class TritonHeadRows:
    """`drafts.DraftRows`."""

    def __init__(self, context: HeadContext) -> None:
        self._context = context
        weights = [
            weight_of(x) for both in zip(context.keys, context.values, strict=True) for x in both
        ]
        self._entries, self._norms = torch.cat(weights), torch.stack(context.key_norms)

    def __call__(self, taps_TXD: Tensor, accepted: Accepted, place: DraftPlace) -> None:
        """Store the rows of what was accepted."""
        of, rotation, pool = self._context, self._context.rotation, place.pool
        _, n_heads, n_layers, _, page_tokens, width = pool.shape
        assert pool.stride()[4:] == (width, 1), f"ring: strides {pool.stride()}"
        projected = norm.rms_norm(of.projection(taps_TXD.flatten(1)), of.norm, of.eps)
        z = linear(projected, self._entries)
        step, gap = _pairs(rotation)
        _write[(len(z), n_layers, n_heads)](
            *(z, self._norms, rotation.frequencies, accepted.rows_B, accepted.start_B),
            *(accepted.accepted_B, place.slot_R, pool, accepted.accepted_B.stride(0)),
            *(*pool.stride()[:4], place.places, rotation.amplitude, of.eps),
            G=len(z) // len(accepted.rows_B),
            L=n_layers,
            H=n_heads,
            E=width,
            P=page_tokens,
            STEP=step,
            GAP=gap,
            BLOCK_E=max(2, triton.next_power_of_2(width // 2)),
            num_warps=1,
        )


def fits(layer: HeadLayer) -> bool:
    """Whether a program's tiles hold a head and its queries."""
    return layer.head_dim <= WIDEST and layer.n_heads <= MOST_MEMBERS * layer.n_kv_heads


class TritonHeadBlock:
    """`drafts.RingBlock`: seven launches."""

    def __init__(self, layer: HeadLayer, rotation: DraftRotation) -> None:
        self._layer, self._rotation = layer, rotation
        self._entry = torch.cat([weight_of(x) for x in (layer.query, layer.key, layer.value)])
        self._out, self._down = weight_of(layer.out), weight_of(layer.down)

    def takes(self, n_rows: int, n_slots: int) -> bool:
        """Any number of rows; the tile of a key head's queries grows with the slots."""
        return n_slots <= SLOTS

    def __call__(self, x_BKD: Tensor, view: DraftView, index: int) -> Tensor:
        """[B, K, D]."""
        layer, n_slots = self._layer, x_BKD.shape[1]
        x = x_BKD.flatten(0, 1)
        z = linear(norm.rms_norm(x, layer.input_norm, layer.eps), self._entry)
        x = torch.addmm(x, self._attended(z, view, index, n_slots), self._out.T)
        h = swiglu(layer.gate_up(norm.rms_norm(x, layer.mlp_norm, layer.eps)))
        return torch.addmm(x, h, self._down.T).view_as(x_BKD)

    def _attended(self, z: Tensor, view: DraftView, index: int, n_slots: int) -> Tensor:
        """[B * K, query heads * E]."""
        layer, rotation, pool = self._layer, self._rotation, view.place.pool[:, :, index]
        width, members = layer.head_dim, layer.n_heads // layer.n_kv_heads
        assert pool.stride()[3:] == (width, 1), f"ring: strides {pool.stride()}"
        stride = view.base_B.stride(0)
        assert view.slot_B.stride(0) == view.start_B.stride(0) == stride, "rows of one table"
        place, n_rows = view.place, len(view.base_B)
        programs = layer.n_kv_heads * n_rows
        parts = Parts(z, layer.n_heads, width, n_parts(min(place.window, view.max_base), programs))
        step, gap = _pairs(rotation)
        _attend[(layer.n_kv_heads, n_rows, parts.n)](
            *(z, layer.query_norm, layer.key_norm, pool, rotation.frequencies),
            *(view.slot_B, view.start_B, view.base_B),
            *(parts.values, parts.lse, len(z), stride, *pool.stride()[:3]),
            *(place.places, place.window, rotation.amplitude),
            *(layer.scale * LOG2_E, layer.eps),
            K=n_slots,
            M=members,
            H=layer.n_kv_heads,
            E=width,
            P=pool.shape[3],
            STEP=step,
            GAP=gap,
            BLOCK_R=max(16, triton.next_power_of_2(n_slots * members)),
            BLOCK_K=max(16, triton.next_power_of_2(n_slots)),
            BLOCK_P=max(16, triton.next_power_of_2(width // 2)),
            BLOCK_E=max(16, triton.next_power_of_2(width)),
            PARTS=parts.n,
            **RESOURCES,
        )
        return parts.united()
