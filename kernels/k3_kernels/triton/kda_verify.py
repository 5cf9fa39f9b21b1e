"""KDA verify of a whole group as one block, replay form: one read of the state, one write, no state per token.

First the accepted prefix of the last group is folded into the state (a product of the recorded deltas with the recorded,
decayed keys), then the new group is treated at once. With G_i the running log decay of the group,
P = S (exp(G_i) k_i), R = S (exp(G_i) q_i), both matrix products on the state:

    M[i,j] = beta_i k_i.(exp(G_i - G_j) k_j), j < i        U = (I + M)^-1 diag(beta) (V - P)
    A[i,j] = q_i.(exp(G_i - G_j) k_j), j <= i              O = R + A U

Keys and queries of a token are neighbours (rows 2i and 2i + 1 of one tile of R rows), so that everything up to the last
product is done once for both: (I + A)(I + M)^-1 turns V - P into U (even columns) and A U (odd columns).
U, K and g are the group's records. Products are three of tf32: float32 up to the last bits.

Two launches. The first does everything that is per token and leaves it in a scratch: `kda_each` where there are many
heads, `kda_tokens` where there are few. `_apply` streams the state. In one kernel every warp that multiplies a small
matrix would compute it again, and its registers would leave room for two programs on a processor: measured 2.66 ms
where the two take a small fraction. What a program overwrites (records, inputs) it alone has read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.reference.group import GroupCache, GroupRule
from k3_kernels.triton.kda_each import prepare_each
from k3_kernels.triton.kda_tokens import prepare_tile
from k3_kernels.triton.tf32 import product

LARGEST_EXPONENT = 60.0  # exp(-G) stays a normal float32, so exp(G_i - G_j) may be taken apart
DEPTH = 32  # channels of a product at once: few registers


@triton.jit
def _chunk(old, grown, channel, pair, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """Of some channels: recorded keys [R, C], the new keys and queries [C, R], the decay of the records [C]."""
    here, is_old, is_new = channel < D, pair < N, pair // 2 < G
    at = old + pair[:, None] * D + channel[None, :]
    k = tl.load(at, mask=is_old[:, None] & here[None, :], other=0.0)
    at = grown + pair[None, :] * D + channel[:, None]
    kq = tl.load(at, mask=is_new[None, :] & here[:, None], other=0.0)
    return k, kq, tl.load(old + N * D + channel, mask=here, other=0.0)


@triton.jit
def _apply(
    o_ptr,
    states_ptr,
    records_ptr,
    slots_ptr,
    read_column_ptr,
    scratch_ptr,
    state_slot,
    state_head,
    record_slot,
    record_head,
    heads,
    G: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    FLOATS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles: tl.constexpr = D // ROWS
    item, start = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * ROWS
    row, head = (item // heads).to(tl.int64), (item % heads).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    read_column = tl.load(read_column_ptr + row).to(tl.int32)
    pair, value = tl.arange(0, R), start + tl.arange(0, ROWS)
    token = pair // 2
    live = token < G
    is_key = (pair % 2 == 0) & live
    state = states_ptr + slot * state_slot + head * state_head + value[:, None] * D
    delta = records_ptr + slot * record_slot + head * record_head + N * D + value[:, None]
    grown = scratch_ptr + item.to(tl.int64) * FLOATS
    values, old = grown + 2 * G * D, grown + 3 * G * D
    answer = old + (N + 1) * D

    known = (pair <= read_column)[None, :]
    old_u = tl.load(delta + pair[None, :] * D, mask=known, other=0.0).to(tl.float32)
    channel = tl.arange(0, CHANNELS)
    state += channel[None, :]
    next_s = tl.load(state)
    if PDL:
        tl.extra.cuda.gdc_wait()  # for the scratch; what is read above is not the work of the launch before
    solution = tl.load(answer + pair[None, :] * R + pair[:, None])  # transposed
    next_k, next_kq, next_decay = _chunk(old, grown, channel, pair, G, N, D)
    seen = tl.zeros([ROWS, R], dtype=tl.float32)  # P and R
    for at in tl.range(0, D, CHANNELS, num_stages=1):
        s, old_k, kq, decay = next_s.to(tl.float32), next_k, next_kq, next_decay
        more = at + CHANNELS  # under way while this chunk is computed
        next_s = tl.load(state + more, mask=more + 0 * channel[None, :] < D, other=0.0)
        next_k, next_kq, next_decay = _chunk(old, grown, more + channel, pair, G, N, D)
        s = s * decay[None, :] + product(old_u, old_k)
        tl.store(state + at, s.to(states_ptr.dtype.element_ty))
        seen += product(s, kq)
    at = values + token[None, :] * D + value[:, None]
    aimed = tl.load(at, mask=is_key[None, :], other=0.0)
    both = product(aimed - seen, solution)  # U and A U
    tl.debug_barrier()  # every thread has read the old deltas
    tl.store(
        delta + token[None, :] * D, both.to(records_ptr.dtype.element_ty), mask=is_key[None, :]
    )
    out = o_ptr + ((row * G + token)[None, :] * heads + head) * D + value[:, None]
    o = (both + seen).to(o_ptr.dtype.element_ty)
    tl.store(out, o, mask=(live & (pair % 2 == 1))[None, :])


def _padded(group: int) -> int:
    return 16 if group <= 8 else 32


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tile of `_apply` (value rows, channels at once, warps); warps of the launch before it and registers of a thread.

    by_tile: that launch takes all tokens of a head at once, otherwise one after the other; hopper: `_apply` starts
    beside it.
    """

    rows: int
    channels: int
    warps: int
    prepare_warps: int
    by_tile: bool
    hopper: bool = False


def tuned(programs: int, *, hopper: bool = False) -> Tuning:
    """As measured on an H200 (132 processors): few programs wait for memory, many for instructions."""
    on_each = -(-programs // 132)
    if on_each > 5:
        return Tuning(64, 32, 4, 1, by_tile=False)
    prepare_warps = 8 if on_each == 1 else 4 if on_each <= 3 else 2
    return Tuning(64, 32, 4, prepare_warps, by_tile=True, hopper=hopper)


def verify(
    u_BGHSD: Tensor,
    raw_BGHD: Tensor,
    beta_BGH: Tensor,
    rule: GroupRule,
    cache: GroupCache,
    slots_B: Tensor,
    read_column_B: Tensor,
    out_BGHD: Tensor,
    tuning: Tuning | None = None,
    *,
    hopper: bool = False,
) -> None:
    """One group per row: writes o, and the rows' states, records, windows and tails. `reference.group.verify`."""
    n_rows, group, heads, _, dim = u_BGHSD.shape
    records = cache.records
    assert records is not None, "the block form keeps records"
    chosen = tuning or tuned(n_rows * heads, hopper=hopper)
    kept = records.shape[3]
    padded = _padded(max(group, kept))
    floats = (5 * group + kept + 1) * dim + padded * padded
    scratch = torch.empty(n_rows * heads * floats, dtype=torch.float32, device=u_BGHSD.device)
    inputs = (u_BGHSD, raw_BGHD, beta_BGH)
    _prepare(inputs, rule, cache, slots_B, read_column_B, scratch, padded, chosen)
    rows = min(chosen.rows, dim)
    _apply[(n_rows * heads * (dim // rows),)](
        out_BGHD,
        cache.states,
        records,
        slots_B,
        read_column_B,
        scratch,
        *cache.states.stride()[:2],
        *records.stride()[:2],
        heads,
        G=group,
        N=kept,
        D=dim,
        R=padded,
        FLOATS=floats,
        ROWS=rows,
        CHANNELS=min(chosen.channels, dim),
        PDL=chosen.hopper,
        num_warps=chosen.warps,
        num_stages=1,
        **({"launch_pdl": True} if chosen.hopper else {}),
    )


def _prepare(
    inputs: tuple[Tensor, Tensor, Tensor],
    rule: GroupRule,
    cache: GroupCache,
    slots_B: Tensor,
    read_column_B: Tensor,
    scratch: Tensor,
    padded: int,
    tuning: Tuning,
) -> None:
    """All that is per token, into the scratch. padded: rows of the triangular system."""
    u_BGHSD, raw_BGHD, beta_BGH = inputs
    n_rows, group, heads, _, dim = u_BGHSD.shape
    records, bound, width = cache.records, rule.lower_bound, rule.conv_HSDw.shape[-1]
    assert records is not None
    arguments = (
        u_BGHSD,
        raw_BGHD,
        beta_BGH,
        rule.conv_HSDw,
        rule.bias_HD,
        rule.decay_H,
        cache.windows,
        cache.tails,
        records,
        slots_B,
        read_column_B,
        scratch,
        *u_BGHSD.stride()[:3],
        *raw_BGHD.stride()[:2],
        *beta_BGH.stride()[:2],
        *cache.windows.stride()[:2],
        *cache.tails.stride()[:2],
        *records.stride()[:2],
        heads,
        0.0 if bound is None else bound,
        rule.eps,
        dim**-0.5,
    )
    shape = {
        "G": group,
        "N": records.shape[3],
        "D": dim,
        "W": width,
        "TAIL": cache.tails.shape[-2],
        "R": padded,
        "BOUNDED": bound is not None,
        "FACTORED": bound is not None and -bound * group <= LARGEST_EXPONENT,
        "FLOATS": scratch.numel() // (n_rows * heads),
        "num_warps": tuning.prepare_warps,
        "num_stages": 1,
    }
    grid = (n_rows * heads,)
    if not tuning.by_tile:
        prepare_each[grid](*arguments, CHANNELS=min(DEPTH, dim), **shape)
        return
    past = u_BGHSD.new_empty(n_rows * heads * 3 * (width - 1) * dim)
    columns = triton.next_power_of_2(width - 1)
    shape |= {"COLUMNS": columns, "CHANNELS": min(DEPTH, dim), "HOPPER": tuning.hopper}
    prepare_tile[grid](*arguments, past, **shape)
