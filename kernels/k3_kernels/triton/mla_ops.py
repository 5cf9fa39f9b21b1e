"""The Triton attention operations: which blocks a shape gets, the launches, the buffers between them.

Same signatures as `reference.mla`; nothing here reads the device from the host, so a step can be captured. The
schedule of a step (how long every row is) is made once and shared by its layers.

Letters: T tokens, B rows, G group tokens, H heads, C latent width, R shared key dims, K = C + R, D value dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from k3_kernels.triton import combine, mla_message, mla_prefill
from k3_kernels.triton.mla import UNIT, attend, schedule
from k3_kernels.triton.mla_write import write_rows

LOG2_E = 1.4426950408889634
ROWS = 32  # of a schedule, at least: with fewer, keys of 12 heads arrive a tenth slower than an H200 can read
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How one shape is cut: queries and keys of a block, which of them lie along the matrix unit's rows, resources.

    fewest: steps of `UNIT` keys below which a row is not split further; at_once: pieces merged at a time, 0: as many as
    a row has on average; hopper: by `mla_hopper`, wide: by `mla_wide`, which both ignore `stages`.
    """

    queries: int
    keys: int
    keys_first: bool
    warps: int
    stages: int = 2
    per_sm: int = 1
    fewest: int = 2
    at_once: int = 0
    hopper: bool = False
    wide: bool = False


def blocks_for(heads: int, group: int, hopper: bool) -> Blocks:
    """For `heads * group` queries that share their keys, as tuned by `benchmarks/tune_mla.py` on an H200."""
    n_queries = heads * group
    if n_queries <= 16:
        return Blocks(16, 64, True, warps=8 if hopper else 4, hopper=hopper)
    if n_queries <= 32:
        return Blocks(32, 64, True, warps=8, hopper=hopper)
    # One token's queries wait for keys, a group's for the matrix unit.
    return Blocks(64, 64, False, warps=8, hopper=hopper, wide=hopper and group > 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's pages, bounds and schedule; `line` [B + 1] counts steps of `UNIT` keys before each row."""

    page_table_BW: Tensor
    bound_T: Tensor
    line: Tensor
    length_B: Tensor
    group: int
    page_tokens: int


class TritonAttention:
    """`api.AttentionOps` on one GPU, or in Triton's interpreter on CPU tensors."""

    def __init__(self, n_sms: int, blocks: Blocks | None = None, *, hopper: bool = False) -> None:
        """n_sms: multiprocessors to fill. hopper: of compute capability 9. blocks: instead of `blocks_for`."""
        self.n_sms = n_sms
        self.hopper = hopper
        self.blocks = blocks

    def write(self, cache_PTK: Tensor, slot_T: Tensor, latent_TK: Tensor) -> None:
        """Store latent rows; slot -1 is skipped."""
        write_rows(cache_PTK, slot_T, latent_TK)

    def plan(
        self, page_table_BW: Tensor, bound_T: Tensor, group: int, max_bound: int, page_tokens: int
    ) -> Plan:
        """One small launch. `max_bound` is not needed: bounds are read on the device."""
        del max_bound
        n_rows = page_table_BW.shape[0]
        line = torch.empty(n_rows + 1, dtype=torch.int32, device=bound_T.device)
        length_B = torch.empty(n_rows, dtype=torch.int32, device=bound_T.device)
        schedule[(1,)](
            bound_T,
            line,
            length_B,
            n_rows,
            G=group,
            UNIT=UNIT,
            BLOCK_B=triton.next_power_of_2(n_rows),
            BLOCK_G=triton.next_power_of_2(group),
        )
        return Plan(page_table_BW.to(torch.int32), bound_T, line, length_B, group, page_tokens)

    def decode(
        self, q_THK: Tensor, cache_PTK: Tensor, plan: Plan, scale: float, value_width: int
    ) -> tuple[Tensor, Tensor]:
        """Absorbed attention of verify groups: o [T, H, C], lse [T, H] float32, natural log."""
        _check(q_THK, cache_PTK)
        n_tokens, heads, width = q_THK.shape
        n_rows, group = n_tokens // plan.group, plan.group
        queries = heads * group
        fits = _fits_hopper(cache_PTK, value_width)
        blocks = self.blocks or blocks_for(heads, group, self.hopper and fits)
        n_blocks = triton.cdiv(queries, blocks.queries)
        n_parts = _parts(max(1, self.n_sms * blocks.per_sm // n_blocks), n_rows)
        block_c = max(16, triton.next_power_of_2(value_width))
        o = torch.empty(n_tokens, heads, value_width, dtype=q_THK.dtype, device=q_THK.device)
        lse = torch.empty(n_tokens, heads, dtype=torch.float32, device=q_THK.device)
        part_o = lse.new_empty(2 * n_parts, queries, value_width)
        part_lse = lse.new_empty(2 * n_parts, queries)
        tensors = (
            q_THK.contiguous(),
            cache_PTK,
            plan.page_table_BW,
            plan.bound_T,
            plan.line,
            plan.length_B,
            o,
            lse,
            part_o,
            part_lse,
        )
        numbers = (
            scale * LOG2_E,
            n_rows,
            n_parts,
            cache_PTK.stride(0),
            plan.page_table_BW.stride(0),
        )
        shape = {
            "H": heads,
            "G": group,
            "P": plan.page_tokens,
            "C": value_width,
            "R": width - value_width,
            "BLOCK_B": max(ROWS, triton.next_power_of_2(n_rows)),
            "M": blocks.queries,
            "N": blocks.keys,
            "UNIT": UNIT,
            "FEWEST": blocks.fewest,
            "KEYS_FIRST": blocks.keys_first,
        }
        grid = (n_blocks, n_parts)
        if blocks.wide:
            _attend_wide(grid, tensors, numbers, shape)
        elif blocks.hopper:
            _attend_hopper(grid, tensors, numbers, shape, blocks.warps)
        else:
            attend[grid](
                *tensors,
                *numbers,
                **shape,
                BLOCK_C=block_c,
                BLOCK_R=max(16, triton.next_power_of_2(width - value_width)),
                STAGES=blocks.stages,
                num_warps=blocks.warps,
            )
        combine.merge_parts[(n_rows * queries,)](
            part_o,
            part_lse,
            plan.line,
            o,
            lse,
            n_rows,
            n_parts,
            H=heads,
            G=group,
            C=value_width,
            BLOCK_C=block_c,
            FEWEST=blocks.fewest,
            AT_ONCE=blocks.at_once or min(32, triton.next_power_of_2(n_parts // n_rows + 2)),
            num_warps=4,
        )
        return o, lse

    prefill = staticmethod(mla_prefill.prefill)

    pack = staticmethod(mla_message.pack)
    merge_packed = staticmethod(mla_message.merge_packed)


def _attend_hopper(
    grid: tuple[int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float | int, ...],
    shape: dict[str, int],
    warps: int,
) -> None:
    from k3_kernels.triton.mla_hopper import attend_hopper, descriptors  # not in the interpreter

    q_THK, cache_PTK, *others = tensors
    tiles = descriptors(_rows(cache_PTK), shape["N"], shape["C"])
    attend_hopper[grid](
        q_THK, cache_PTK, *tiles, *others, *numbers, **shape, W=warps, num_warps=warps
    )


def _attend_wide(
    grid: tuple[int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float | int, ...],
    shape: dict[str, int],
) -> None:
    from k3_kernels.triton import mla_wide  # not in the interpreter

    q_THK, cache_PTK, *others = tensors
    rows, queries = _rows(cache_PTK), q_THK.flatten(0, 1)
    tiles = (*mla_wide.descriptors(rows), *mla_wide.descriptors(queries))
    kept = {name: shape[name] for name in ("H", "G", "P", "R", "BLOCK_B", "M", "N", "FEWEST")}
    kept |= {"D": shape["C"] // 2}
    kept |= dict(zip(("FOR_PRODUCTS", "FOR_COPIES"), mla_wide.REGISTERS, strict=True))
    mla_wide.attend_wide[grid](cache_PTK, *tiles, *others, *numbers, **kept, num_warps=4)


def _rows(cache_PTK: Tensor) -> Tensor:
    """The pages as one long matrix of latent rows, those of other layers between them included."""
    n_pages, page_tokens, width = cache_PTK.shape
    n_rows = (n_pages - 1) * (cache_PTK.stride(0) // width) + page_tokens
    return cache_PTK.as_strided((n_rows, width), (width, 1))


def _parts(n_parts: int, n_rows: int) -> int:
    """Pieces to cut the line into: a few less when rows of one length then share none, which saves starting over."""
    even = n_parts // n_rows * n_rows
    return even if even * 16 >= n_parts * 15 else n_parts


def _fits_hopper(cache_PTK: Tensor, latent: int) -> bool:
    """Whether the Hopper kernels take such a cache: K3's widths, whole tiles on a page, rows at multiples of a row."""
    _, page_tokens, width = cache_PTK.shape
    aligned = page_tokens % UNIT == 0 and cache_PTK.stride(0) % width == 0
    return (width, latent) == (576, 512) and aligned and cache_PTK.dtype.itemsize == 2


def _check(q_THK: Tensor, cache_PTK: Tensor) -> None:
    if q_THK.dtype not in DTYPES or cache_PTK.dtype != q_THK.dtype:
        raise TypeError(
            f"queries {q_THK.dtype}, cache {cache_PTK.dtype}: the triton attention takes one of "
            f"{', '.join(map(str, DTYPES))} for both; set backends.attention=reference for others"
        )
    row = q_THK.shape[-1]
    if cache_PTK.stride(2) != 1 or cache_PTK.stride(1) != row:
        raise ValueError(
            f"cache strides {cache_PTK.stride()}: rows of a page must follow each other, "
            f"expected (page stride, {row}, 1)"
        )
