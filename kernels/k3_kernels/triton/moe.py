"""Routed experts in four launches and without a host read: group, first product and activation, second product, sum.

A step has a bounded number of (token, choice) pairs, and a program finds its work on the device: `_group` lists the
pairs of every expert held here, and programs of the products share out the blocks of (expert, weight rows, up to TOKENS
pairs) among themselves. Weights are the left operand: a block needs few tokens, and with few tokens reading the weights
is all that counts. Pairs of experts held elsewhere are never touched.

Letters: T tokens, k choices, Z expert input and output width, F inner width, E experts held here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.reference.moe import DenseExperts, ExpertWeights
from k3_kernels.triton.mxfp4 import BLOCK, DealtExperts, packed_product

PAIRS = 1024  # a program of `_group` looks at so many at once
SUM = 1024  # channels of a program of `_sum`


@triton.jit
def _group(ids_ptr, pairs_ptr, counts_ptr, first, n_pairs, capacity, PAIRS: tl.constexpr):
    """Pairs of one expert in order, and their number."""
    held = tl.program_id(0)
    count = 0
    for start in tl.range(0, n_pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        mine = (tl.load(ids_ptr + pair, mask=pair < n_pairs, other=-1) == first + held).to(tl.int32)
        place = count + tl.cumsum(mine, 0) - 1
        tl.store(pairs_ptr + held * capacity + place, pair, mask=mine > 0)
        count += tl.sum(mine, 0)
    tl.store(counts_ptr + held, count)


@triton.jit
def _product(
    x_row,
    here,
    w_row,
    inside,
    width,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Weight rows times tokens: [ROWS, TOKENS] float32. Rows are pointers; `width` inputs. EVEN: tiles are whole."""
    acc = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
    for start in tl.range(0, width, WIDTH, num_stages=STAGES):
        k = start + tl.arange(0, WIDTH)[None, :]
        if EVEN:
            x = tl.load(x_row[:, None] + k, mask=here[:, None], other=0.0)
            w = tl.load(w_row[:, None] + k)
        else:
            x = tl.load(x_row[:, None] + k, mask=here[:, None] & (k < width), other=0.0)
            w = tl.load(w_row[:, None] + k, mask=inside[:, None] & (k < width), other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return acc


@triton.jit
def soft_clip(x, limit):
    """limit tanh(x / limit). Small arguments by series: 1 - exp(-2x) has lost their digits."""
    x = x / limit
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    square = x * x
    small = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    return tl.where(tl.abs(x) < 0.05, small, tl.where(x < 0.0, -y, y)) * limit


@triton.jit
def _blocks(counts_ptr, n_experts, rows, E: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Blocks of work before and after each expert, [E] each, and how many there are."""
    expert = tl.arange(0, E)
    count = tl.load(counts_ptr + expert, mask=expert < n_experts, other=0)
    blocks = tl.cdiv(count, TOKENS) * tl.cdiv(rows, ROWS)
    ends = tl.cumsum(blocks, 0)
    return ends - blocks, ends, tl.sum(blocks, 0)


@triton.jit
def _block(
    item, begins, ends, counts_ptr, pairs_ptr, capacity, E: tl.constexpr, TOKENS: tl.constexpr
):
    """Of a block of work: expert (int64), block of rows, its pairs [TOKENS] and which of them are real.

    Blocks that read the same weights follow each other.
    """
    expert = tl.sum((ends <= item).to(tl.int32), 0)
    local = item - tl.sum(tl.where(tl.arange(0, E) == expert, begins, 0), 0)
    count = tl.load(counts_ptr + expert)
    tiles = tl.cdiv(count, TOKENS)
    place = (local % tiles) * TOKENS + tl.arange(0, TOKENS)
    here = place < count
    pair = tl.load(pairs_ptr + expert * capacity + place, mask=here, other=0)
    return expert.to(tl.int64), local // tiles, pair.to(tl.int64), here


@triton.jit
def _inner(
    z_ptr,
    w13_ptr,
    scale_ptr,
    counts_ptr,
    pairs_ptr,
    active_ptr,
    n_experts,
    capacity,
    z_token,
    top_k,
    z_width,
    f_width,
    beta,
    linear_beta,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    EVEN: tl.constexpr,
    CLIPPED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """situ of gate and up products: active [pair, F]. A block has ROWS / 2 gate rows and their up rows in turn."""
    dtype: tl.constexpr = active_ptr.dtype.element_ty
    blocks = tl.cdiv(z_width, 128)
    begins, ends, total = _blocks(counts_ptr, n_experts, f_width, E, ROWS // 2, TOKENS)
    for item in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, block, pair, here = _block(
            item, begins, ends, counts_ptr, pairs_ptr, capacity, E, TOKENS
        )
        either = tl.arange(0, ROWS)
        unit = block * (ROWS // 2) + either // 2
        row = expert * (2 * f_width) + (either % 2) * f_width + unit
        x_row, inside = z_ptr + (pair // top_k) * z_token, unit < f_width
        if PACKED:
            words, scales = w13_ptr + row * (blocks * 16), scale_ptr + row * blocks
            inner = packed_product(
                x_row, here, words, scales, inside, z_width, ROWS, TOKENS, EVEN, STAGES
            )
        else:
            w_row = w13_ptr + row * z_width
            inner = _product(x_row, here, w_row, inside, z_width, ROWS, TOKENS, WIDTH, EVEN, STAGES)
        inner = tl.reshape(inner.to(dtype), [ROWS // 2, 2, TOKENS])
        gate, up = tl.split(tl.permute(inner, [0, 2, 1]))
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        if CLIPPED:
            up = soft_clip(up, linear_beta)
        active = soft_clip(gate, beta) * tl.sigmoid(gate) * up
        f = block * (ROWS // 2) + tl.arange(0, ROWS // 2)
        at = active_ptr + pair[:, None] * f_width + f[None, :]
        tl.store(at, tl.trans(active.to(dtype)), mask=here[:, None] & (f < f_width)[None, :])


@triton.jit
def _outer(
    active_ptr,
    w2_ptr,
    scale_ptr,
    counts_ptr,
    pairs_ptr,
    y_ptr,
    n_experts,
    capacity,
    z_width,
    f_width,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Down products: y [pair, Z]."""
    blocks = tl.cdiv(f_width, 128)
    begins, ends, total = _blocks(counts_ptr, n_experts, z_width, E, ROWS, TOKENS)
    for item in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, block, pair, here = _block(
            item, begins, ends, counts_ptr, pairs_ptr, capacity, E, TOKENS
        )
        z = block * ROWS + tl.arange(0, ROWS)
        row = expert * z_width + z
        x_row, inside = active_ptr + pair * f_width, z < z_width
        if PACKED:
            words, scales = w2_ptr + row * (blocks * 16), scale_ptr + row * blocks
            y = packed_product(
                x_row, here, words, scales, inside, f_width, ROWS, TOKENS, EVEN, STAGES
            )
        else:
            w_row = w2_ptr + row * f_width
            y = _product(x_row, here, w_row, inside, f_width, ROWS, TOKENS, WIDTH, EVEN, STAGES)
        at = y_ptr + pair[:, None] * z_width + z[None, :]
        y = tl.trans(y.to(y_ptr.dtype.element_ty))
        tl.store(at, y, mask=here[:, None] & (z < z_width)[None, :])


@triton.jit
def _sum(
    y_ptr, ids_ptr, weight_ptr, o_ptr, first, n_experts, top_k, z_width, CHANNELS: tl.constexpr
):
    """A token's outputs times their weights, in the order of choice."""
    token = tl.program_id(0).to(tl.int64)
    z = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    o = tl.zeros([CHANNELS], dtype=tl.float32)
    for k in tl.range(0, top_k):
        pair = token * top_k + k
        held = tl.load(ids_ptr + pair) - first
        here = (held >= 0) & (held < n_experts)
        y = tl.load(y_ptr + pair * z_width + z, mask=here & (z < z_width), other=0.0)
        o += tl.load(weight_ptr + pair) * y.to(tl.float32)
    tl.store(o_ptr + token * z_width + z, o, mask=z < z_width)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tile of a product: weight rows, tokens, inputs of one step of its loop; steps under way, warps; programs of an SM."""

    rows: int
    tokens: int
    width: int
    stages: int
    warps: int
    programs: int


def tuned(n_tokens: int, packed: bool) -> Tuning:
    """Few tokens: the weights stream through. Many: tiles that use a weight more often. As measured on an H200."""
    if n_tokens > 512:
        return Tuning(128, 64, 128, 3, 4, 4) if packed else Tuning(128, 64, 64, 4, 8, 2)
    return Tuning(64, 16, 128, 3, 2, 4) if packed else Tuning(64, 16, 128, 3, 4, 3)


def experts(
    z_TZ: Tensor,
    ids_Tk: Tensor,
    weight_Tk: Tensor,
    weights: ExpertWeights,
    beta: float,
    linear_beta: float | None,
    n_sms: int,
    tuning: Tuning | None = None,
) -> Tensor:
    """`reference.moe.experts`: [T, Z] float32. A token's ids are distinct; rows of z may be strided.

    weights: as `TritonMoe.prepare` gives them.
    """
    n_tokens, top_k = ids_Tk.shape
    w13, w13_scale, w2, w2_scale, packed = _matrices(weights)
    n_experts, z_width, f_width = weights.count, z_TZ.shape[1], w13.shape[1] // 2
    assert z_TZ.stride(1) == 1, f"expert inputs: strides {z_TZ.stride()}"
    assert ids_Tk.is_contiguous(), f"expert ids: strides {ids_Tk.stride()}"
    assert weight_Tk.is_contiguous(), f"expert weights: strides {weight_Tk.stride()}"
    make = {"device": z_TZ.device}
    o = torch.empty(n_tokens, z_width, dtype=torch.float32, **make)
    if not n_tokens:
        return o
    n_pairs = ids_Tk.numel()
    counts = torch.empty(n_experts, dtype=torch.int32, **make)
    pairs = torch.empty(n_experts, n_tokens, dtype=torch.int32, **make)
    active = torch.empty(n_pairs, f_width, dtype=z_TZ.dtype, **make)
    y = torch.empty(n_pairs, z_width, dtype=z_TZ.dtype, **make)
    block = min(PAIRS, triton.next_power_of_2(n_pairs))
    _group[(n_experts,)](
        ids_Tk, pairs, counts, weights.first, n_pairs, n_tokens, PAIRS=block, num_warps=4
    )
    chosen = tuning or tuned(n_tokens, packed)
    width = BLOCK if packed else chosen.width
    grid = (n_sms * chosen.programs,)
    constants = {
        "E": triton.next_power_of_2(n_experts),
        "ROWS": chosen.rows,
        "TOKENS": chosen.tokens,
        "WIDTH": chosen.width,
        "PACKED": packed,
        "STAGES": chosen.stages,
        "num_warps": chosen.warps,
    }
    _inner[grid](
        z_TZ,
        w13,
        w13_scale,
        counts,
        pairs,
        active,
        n_experts,
        n_tokens,
        z_TZ.stride(0),
        top_k,
        z_width,
        f_width,
        beta,
        1.0 if linear_beta is None else linear_beta,
        CLIPPED=linear_beta is not None,
        EVEN=z_width % width == 0 and f_width % (chosen.rows // 2) == 0,
        **constants,
    )
    _outer[grid](
        active,
        w2,
        w2_scale,
        counts,
        pairs,
        y,
        n_experts,
        n_tokens,
        z_width,
        f_width,
        EVEN=f_width % width == 0 and z_width % chosen.rows == 0,
        **constants,
    )
    _sum[(n_tokens, triton.cdiv(z_width, SUM))](
        y,
        ids_Tk,
        weight_Tk,
        o,
        weights.first,
        n_experts,
        top_k,
        z_width,
        CHANNELS=min(SUM, triton.next_power_of_2(z_width)),
        num_warps=4,
    )
    return o


def _matrices(weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """w13, its scales, w2, its scales (any tensor where there are none), whether packed."""
    match weights:
        case DenseExperts(_, w13, w2):
            parts = (w13, w13, w2, w2, False)
        case DealtExperts(_, inner, outer):
            parts = (inner.words, inner.scales, outer.words, outer.scales, True)
        case _:
            raise TypeError(
                f"expert weights {type(weights).__name__}: expected dense or dealt ones"
            )
    for part in parts[:4]:
        assert part.is_contiguous(), f"expert weights: strides {part.stride()}"
    return parts
