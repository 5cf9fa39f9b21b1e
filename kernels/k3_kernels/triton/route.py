"""Router of experts in two launches: gate logits in pieces of the hidden width, then choice and weights of a token.

The number of pieces and the order of their sum depend on the model alone, so a token's choice does not depend on which
others are in the step. Equal scores: the lowest id first; chosen ids come with the best biased score first.

Letters: T tokens, D hidden size, E experts, k experts per token, S pieces of the hidden width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.reference.moe import Routing
from k3_kernels.triton.best import index_of, ranked

TOKENS, EXPERTS, WIDTH = 128, 64, 64  # of a program at most, and its step along the width
GATES = (torch.float32, torch.bfloat16)
PIECE = 1024  # of the hidden width, at least


@triton.jit
def _leading(x):
    """The first 8 of a float32's 24 digits as bfloat16, and the rest."""
    bits = x.to(tl.int32, bitcast=True)
    first = (bits & -65536).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - first


@triton.jit
def _add_products(gate, x, large, small):
    """large + small + gate x^T. Sums of the gate's first digits and of the others are apart: each is rounded less often.

    A float32's digits are three bfloat16 numbers, whose products with a bfloat16 are exact.
    """
    if x.dtype == tl.bfloat16:
        first = gate
        if gate.dtype == tl.float32:
            first, rest = _leading(gate)
            second, rest = _leading(rest)
            third, _ = _leading(rest)
            small = tl.dot(third, tl.trans(x), small)
            small = tl.dot(second, tl.trans(x), small)
        large = tl.dot(first, tl.trans(x), large)
    else:
        wide = tl.trans(x.to(tl.float32))
        large = tl.dot(gate.to(tl.float32), wide, large, input_precision="ieee")
    return large, small


@triton.jit
def _logits(
    x_ptr,
    gate_ptr,
    logits_ptr,
    x_token,
    n_tokens,
    n_experts,
    width,
    piece,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    split = tl.program_id(2)
    known, real = token < n_tokens, expert < n_experts
    # rows beyond the last are read in its place and never stored
    row = tl.minimum(token, n_tokens - 1).to(tl.int64)[:, None]
    x_row = x_ptr + row * x_token
    gate_row = gate_ptr + tl.minimum(expert, n_experts - 1)[:, None] * width
    large = tl.zeros([EXPERTS, TOKENS], dtype=tl.float32)
    small = tl.zeros_like(large)
    first = split * piece
    for start in tl.range(first, tl.minimum(first + piece, width), WIDTH, num_stages=STAGES):
        channel = start + tl.arange(0, WIDTH)[None, :]
        if EVEN:
            x, gate = tl.load(x_row + channel), tl.load(gate_row + channel)
        else:
            x = tl.load(x_row + channel, mask=channel < width, other=0.0)
            gate = tl.load(gate_row + channel, mask=channel < width, other=0.0)
        large, small = _add_products(gate, x, large, small)
    at = (split.to(tl.int64) * n_tokens + token[:, None]) * n_experts + expert[None, :]
    tl.store(logits_ptr + at, tl.trans(large + small), mask=known[:, None] & real[None, :])


@triton.jit
def _limited(biased, top_groups, SIZE: tl.constexpr):
    """Biased scores [groups, SIZE] outside the best groups become -inf; a group counts with its two best."""
    best = tl.max(biased, 1)
    where = tl.argmax(biased, 1)
    others = tl.where(tl.arange(0, SIZE)[None, :] == where[:, None], float("-inf"), biased)
    second = tl.max(others, 1)
    # A group of one expert has no second.
    left = best + tl.where(second > float("-inf"), second, 0.0)
    kept = tl.zeros_like(left)
    for _ in tl.range(0, top_groups):
        chosen = tl.arange(0, left.shape[0]) == tl.argmax(left, 0)
        kept = tl.where(chosen, 1.0, kept)
        left = tl.where(chosen, float("-inf"), left)
    return tl.where(kept[:, None] > 0, biased, float("-inf"))


@triton.jit
def _best(keys, K: tl.constexpr):
    """The K best, the best first. Halves are compared early: a thread holds numbers of both."""
    SIZE: tl.constexpr = keys.shape[0]
    if SIZE >= 2 * K:
        keys = tl.permute(tl.reshape(keys, [2, SIZE // K // 2, K]), (1, 0, 2))
        keys = tl.reshape(keys, [SIZE])
    return tl.topk(keys, K)


@triton.jit
def _choose(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weight_ptr,
    n_tokens,
    n_experts,
    group_size,
    n_groups,
    top_groups,
    top_k,
    scaling,
    PIECES: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    LIMITED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
    real = (group < n_groups) & (place < group_size)
    expert = group * group_size + place
    logits = tl.zeros([GROUPS, SIZE], dtype=tl.float32)
    for piece in tl.static_range(PIECES):
        at = (piece * n_tokens + token) * n_experts + expert
        logits += tl.load(logits_ptr + at, mask=real, other=0.0)
    if SIGMOID:
        score = tl.sigmoid(logits)
    else:
        logits = tl.where(real, logits, float("-inf"))
        score = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    biased = score + tl.load(bias_ptr + expert, mask=real, other=0.0)
    biased = tl.where(real, biased, float("-inf"))
    if LIMITED:
        biased = _limited(biased, top_groups, SIZE)
    score, place = tl.reshape(score, [GROUPS * SIZE]), tl.arange(0, GROUPS * SIZE)
    at = index_of(_best(ranked(tl.reshape(biased, [GROUPS * SIZE]), place), K)).to(tl.int32)
    ids = at // SIZE * group_size + at % SIZE
    rank = tl.arange(0, K)
    asked = rank < top_k
    weight = tl.where(asked, tl.gather(score, at, 0), 0.0)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(ids_ptr + token * top_k + rank, ids.to(tl.int64), mask=asked)
    tl.store(weight_ptr + token * top_k + rank, weight * scaling, mask=asked)


def route(x_TD: Tensor, gate_ED: Tensor, bias_E: Tensor, rule: Routing) -> tuple[Tensor, Tensor]:
    """`reference.moe.route`: ids [T, k] int64, weights [T, k] float32. Rows of x may be strided.

    A gate in bfloat16 stands for the same numbers in float32.
    """
    n_tokens, width = x_TD.shape
    n_experts = len(gate_ED)
    assert x_TD.stride(1) == 1, f"hidden rows: strides {x_TD.stride()}"
    assert gate_ED.is_contiguous(), f"gate: strides {gate_ED.stride()}"
    assert bias_E.dtype == torch.float32, f"bias {bias_E.dtype}: expected float32"
    assert gate_ED.dtype in GATES, f"gate {gate_ED.dtype}: expected one of {GATES}"
    options = {"dtype": torch.float32, "device": x_TD.device}
    piece = PIECE if width >= 2 * PIECE else width
    pieces = triton.cdiv(width, piece)
    logits = torch.empty(pieces, n_tokens, n_experts, **options)
    ids = torch.empty(n_tokens, rule.top_k, dtype=torch.int64, device=x_TD.device)
    weight = torch.empty(n_tokens, rule.top_k, **options)
    if not n_tokens:
        return ids, weight
    tokens = min(TOKENS, max(16, triton.next_power_of_2(n_tokens)))
    grid = (triton.cdiv(n_tokens, tokens), triton.cdiv(n_experts, EXPERTS), pieces)
    tile = {
        "TOKENS": tokens,
        "EXPERTS": EXPERTS,
        "WIDTH": WIDTH,
        "STAGES": 5 if tokens <= 32 else 3,  # so few wait for the gate alone
        "EVEN": width % WIDTH == 0,
    }
    _logits[grid](
        x_TD,
        gate_ED,
        logits,
        x_TD.stride(0),
        n_tokens,
        n_experts,
        width,
        piece,
        **tile,
        num_warps=4,
    )
    limited = rule.n_groups > rule.top_groups
    groups = rule.n_groups if limited else 1
    _choose[(n_tokens,)](
        logits,
        bias_E,
        ids,
        weight,
        n_tokens,
        n_experts,
        n_experts // groups,
        groups,
        rule.top_groups,
        rule.top_k,
        rule.scaling,
        PIECES=pieces,
        GROUPS=triton.next_power_of_2(groups),
        SIZE=triton.next_power_of_2(max(n_experts // groups, 2)),
        K=triton.next_power_of_2(max(rule.top_k, 2)),
        SIGMOID=rule.activation == "sigmoid",
        LIMITED=limited,
        RENORMALIZE=rule.renormalize and rule.top_k > 1,
        num_warps=4,
    )
    return ids, weight
