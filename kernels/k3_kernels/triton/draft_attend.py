"""A latent drafter's attention over its ring and its own block, and the layer around it.

A program is one head of one request's block. It makes its queries from the projected factor, absorbs the keys' up
projection, rotates, and goes over the block's own rows, made from the same projection, and then over the ring's rows
that may be looked at; a softmax without a causal mask. Rules: `k3.model.draft_attention.LatentAttention`. Layers that are
so large that launches do not matter are not done here (`fits`).

Letters: B requests, K slots, H heads, Q query factor, N plain and E rotated dims, C latent width, V value dims, W = C + E,
S keys of a tile, P tokens per page, F inner width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from k3_kernels.drafts import DraftRotation, DraftView
from k3_kernels.layers import DraftLayer
from k3_kernels.triton import norm
from k3_kernels.triton.draft_parts import (
    FLOOR,
    Parts,
    brought_in,
    finished,
    n_parts,
    oldest_seen,
    share,
)
from k3_kernels.triton.draft_rows import normed, turned
from k3_kernels.triton.products import weight_of

LOG2_E = 1.4426950408889634
SLOTS = 16  # of a block at most: rows of the matrix unit
KEYS = 64
WIDEST = {"query": 256, "nope": 64, "rope": 64, "latent": 128, "value": 64}


@triton.jit
def _seen(q, q_first, q_second, k, k_first, k_second, is_seen, scale, best, total, o):
    """One tile of keys into a running softmax."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    s = tl.dot(q_first, tl.trans(k_first), s, input_precision="ieee")
    s = tl.dot(q_second, tl.trans(k_second), s, input_precision="ieee") * scale
    return brought_in(s, k, is_seen, best, total, o)


@triton.jit
def _attend(
    z_ptr,
    query_norm_ptr,
    query_up_ptr,
    latent_norm_ptr,
    up_ptr,
    pool_ptr,
    frequency_ptr,
    slot_ptr,
    start_ptr,
    base_ptr,
    o_ptr,
    lse_ptr,
    n_tokens,
    view_stride,
    up_head,
    pool_unit,
    places,
    window,
    amplitude,
    scale,
    eps,
    K: tl.constexpr,
    H: tl.constexpr,
    Q: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    STEP: tl.constexpr,
    GAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
):
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    k, q, n = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_N)
    e, c, v = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_V)
    is_slot, is_pair, is_latent = k < K, e < E // 2, c < C
    base = tl.load(base_ptr + b * view_stride)
    position = (base + k)[:, None]
    frequency = tl.load(frequency_ptr + e, mask=is_pair, other=0.0)
    z = z_ptr + (b * K + k)[:, None] * (Q + C + E)

    x = tl.load(z + q[None, :], mask=is_slot[:, None] & (q < Q)[None, :], other=0.0)
    weight = tl.load(query_norm_ptr + q, mask=q < Q, other=0.0).to(tl.float32)
    x = normed(x.to(tl.float32), weight, Q, eps, dtype)
    w = query_up_ptr + head * (N + E) * Q + q[:, None]
    is_q = (q < Q)[:, None]
    w_plain = tl.load(w + n[None, :] * Q, mask=is_q & (n < N)[None, :], other=0.0)
    plain = tl.dot(x, w_plain, input_precision="ieee").to(dtype)
    w += (N + e * STEP)[None, :] * Q
    w_part = tl.load(w, mask=is_q & is_pair[None, :], other=0.0)
    q_first = tl.dot(x, w_part, input_precision="ieee").to(dtype).to(tl.float32)
    w_part = tl.load(w + GAP * Q, mask=is_q & is_pair[None, :], other=0.0)
    q_second = tl.dot(x, w_part, input_precision="ieee").to(dtype).to(tl.float32)
    q_first, q_second = turned(q_first, q_second, position, frequency[None, :], amplitude)
    q_first, q_second = q_first.to(dtype), q_second.to(dtype)
    up = up_ptr + head * up_head
    k_up = tl.load(
        up + n[:, None] * C + c[None, :], mask=(n < N)[:, None] & is_latent[None, :], other=0.0
    )
    absorbed = tl.dot(plain, k_up, input_precision="ieee").to(dtype)

    own = tl.load(z + Q + c[None, :], mask=is_slot[:, None] & is_latent[None, :], other=0.0)
    weight = tl.load(latent_norm_ptr + c, mask=is_latent, other=0.0).to(tl.float32)
    own = normed(own.to(tl.float32), weight, C, eps, dtype)
    z += Q + C + (e * STEP)[None, :]
    inside = is_slot[:, None] & is_pair[None, :]
    first = tl.load(z, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(z + GAP, mask=inside, other=0.0).to(tl.float32)
    first, second = turned(first, second, position, frequency[None, :], amplitude)
    best = tl.full([BLOCK_K], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    o = tl.zeros([BLOCK_K, BLOCK_C], tl.float32)
    best, total, o = _seen(
        absorbed,
        q_first,
        q_second,
        own,
        first.to(dtype),
        second.to(dtype),
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
        rows = pool_ptr + ((ring + key // P % places) * pool_unit + key % P * (C + E))[:, None]
        latent = tl.load(rows + c[None, :], mask=is_seen[:, None] & is_latent[None, :], other=0.0)
        rows += C + (e * STEP)[None, :]
        is_read = is_seen[:, None] & is_pair[None, :]
        k_first = tl.load(rows, mask=is_read, other=0.0)
        k_second = tl.load(rows + GAP, mask=is_read, other=0.0)
        best, total, o = _seen(
            absorbed, q_first, q_second, latent, k_first, k_second, is_seen, scale, best, total, o
        )
    o = finished(o, total).to(dtype)
    weight_up = tl.load(
        up + (N + v)[None, :] * C + c[:, None],
        mask=(v < V)[None, :] & is_latent[:, None],
        other=0.0,
    )
    values = tl.dot(o, weight_up, input_precision="ieee").to(o_ptr.dtype.element_ty)
    line = (part * n_tokens + b * K + k) * H + head
    tl.store(
        o_ptr + line[:, None] * V + v[None, :], values, mask=is_slot[:, None] & (v < V)[None, :]
    )
    if PARTS > 1:
        tl.store(lse_ptr + line, best + tl.log2(tl.maximum(total, 1e-30)), mask=is_slot)


@triton.jit
def _swiglu(x_ptr, y_ptr, x_row, width, BLOCK: tl.constexpr):
    row, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < width
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * x_row + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + width + f, mask=inside, other=0.0).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(y_ptr + row * width + f, (gate * up).to(dtype), mask=inside)


def swiglu(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) up of a joint projection [T, 2F]: [T, F], both factors rounded as torch does."""
    n_rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    assert gate_up_TF.stride(1) == 1, f"gate and up: strides {gate_up_TF.stride()}"
    y = gate_up_TF.new_empty(n_rows, width)
    block = min(1024, triton.next_power_of_2(width))
    _swiglu[(n_rows, triton.cdiv(width, block))](
        gate_up_TF, y, gate_up_TF.stride(0), width, BLOCK=block
    )
    return y


def fits(layer: DraftLayer) -> bool:
    """Whether a program's tiles hold what a head has."""
    _, both, rank = layer.kv_up_HEC.shape
    sizes = {
        "query": len(layer.query_norm),
        "nope": layer.nope,
        "rope": layer.rope,
        "latent": rank,
        "value": both - layer.nope,
    }
    return all(sizes[name] <= most for name, most in WIDEST.items())


def _tile(width: int) -> int:
    """As wide as the matrix unit wants it."""
    return max(16, triton.next_power_of_2(width))


class TritonDraftBlock:
    """`drafts.RingBlock`: eight launches."""

    def __init__(self, layer: DraftLayer, rotation: DraftRotation) -> None:
        assert fits(layer), "a layer of this size is computed part by part"
        self._layer, self._rotation = layer, rotation
        self._entry = torch.cat((weight_of(layer.query_down), weight_of(layer.entry)))
        self._query_up = weight_of(layer.query_up).contiguous()
        self._out, self._down = weight_of(layer.out), weight_of(layer.down)
        assert layer.kv_up_HEC.stride()[1:] == (layer.kv_up_HEC.shape[2], 1), "up-projections"
        heads, both, rank = layer.kv_up_HEC.shape
        query, nope, rope = len(layer.query_norm), layer.nope, layer.rope
        step, gap = (2, 1) if rotation.is_interleaved else (1, rope // 2)
        self._shape = {
            "H": heads,
            "Q": query,
            "N": nope,
            "E": rope,
            "C": rank,
            "V": both - nope,
            "STEP": step,
            "GAP": gap,
            "BLOCK_K": SLOTS,
            "BLOCK_Q": _tile(query),
            "BLOCK_N": _tile(nope),
            "BLOCK_E": _tile(rope // 2),
            "BLOCK_C": _tile(rank),
            "BLOCK_V": _tile(both - nope),
            "S": KEYS,
            "num_warps": 8,
            "num_stages": 2,
        }

    def takes(self, n_rows: int, n_slots: int) -> bool:
        """Any number of rows."""
        return n_slots <= SLOTS

    def __call__(self, x_BKD: Tensor, view: DraftView, index: int) -> Tensor:
        """[B, K, D]."""
        layer, n_slots = self._layer, x_BKD.shape[1]
        assert n_slots <= SLOTS, f"{n_slots} slots: a program holds {SLOTS}"
        x = x_BKD.flatten(0, 1)
        z = linear(norm.rms_norm(x, layer.input_norm, layer.eps), self._entry)
        x = torch.addmm(x, self._attended(z, view, index, n_slots), self._out.T)
        h = swiglu(layer.gate_up(norm.rms_norm(x, layer.mlp_norm, layer.eps)))
        return torch.addmm(x, h, self._down.T).view_as(x_BKD)

    def _attended(self, z: Tensor, view: DraftView, index: int, n_slots: int) -> Tensor:
        """[B * K, H * V]."""
        layer, rotation, place = self._layer, self._rotation, view.place
        pool = place.pool[:, index]
        assert pool.stride()[1:] == (pool.shape[2], 1), f"ring: strides {pool.stride()}"
        stride = view.base_B.stride(0)
        assert view.slot_B.stride(0) == view.start_B.stride(0) == stride, "rows of one table"
        heads, n_rows = self._shape["H"], len(view.base_B)
        parts = Parts(
            z, heads, self._shape["V"], n_parts(min(place.window, view.max_base), heads * n_rows)
        )
        _attend[(heads, n_rows, parts.n)](
            *(z, layer.query_norm, self._query_up, layer.latent_norm, layer.kv_up_HEC),
            *(pool, rotation.frequencies, view.slot_B, view.start_B, view.base_B),
            *(parts.values, parts.lse, len(z), stride),
            *(layer.kv_up_HEC.stride(0), pool.stride(0), place.places, place.window),
            *(rotation.amplitude, layer.scale * LOG2_E, layer.eps),
            K=n_slots,
            P=pool.shape[1],
            PARTS=parts.n,
            **self._shape,
        )
        return parts.united()
