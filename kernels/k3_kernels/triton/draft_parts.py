"""Keys of a ring: a tile into a softmax, and long rings in parts, the programs that share them and their union.

A block's programs are few (heads times requests), and each goes through its keys one tile after the other. Where the ring
may be long, several programs take a share of the tiles each and leave float32 values with base-2 log-sum-exps; one
launch unites them. A share may be empty: its log-sum-exp is -inf and its values count nothing.

Letters: Y parts, T = B * K tokens, H heads, V value dims.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # that keep a GPU busy: keys are waited for
SHARE = 256  # keys that one program may as well do alone
FLOOR = tl.constexpr(-1e30)  # below every score; finite, so that what sees nothing stays a number


@triton.jit
def oldest_seen(start, base, window):
    """First position of a ring that a block at `base` sees."""
    return tl.maximum(tl.maximum(tl.minimum(start, base), base - window), 0)


@triton.jit
def share(oldest, base, part, S: tl.constexpr, PARTS: tl.constexpr):
    """First position of a part and the one behind its last, whole tiles of S."""
    width = tl.cdiv(tl.cdiv(base - oldest, S), PARTS) * S
    start = oldest + part * width
    return start, tl.minimum(start + width, base)


@triton.jit
def brought_in(s, v, is_seen, best, total, o):
    """One tile of keys into a running softmax: scores s, values v."""
    s = tl.where(is_seen[None, :], s, float("-inf"))
    newest = tl.maximum(best, tl.max(s, 1))
    fade, p = tl.exp2(best - newest), tl.exp2(s - newest[:, None])
    o = tl.dot(p.to(v.dtype), v, o * fade[:, None], input_precision="ieee")
    return newest, total * fade + tl.sum(p, 1), o


@triton.jit
def finished(o, total):
    """Weighted sums by the weights' sum; 0 where nothing was seen."""
    return o / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _unite(
    part_ptr, lse_ptr, o_ptr, n, V: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    part, v = tl.arange(0, PARTS), tl.arange(0, BLOCK_V)
    lse = tl.load(lse_ptr + part * n + at)
    weight = tl.exp2(lse - tl.max(lse, 0))
    inside = (v < V)[None, :]
    values = tl.load(part_ptr + (part * n + at)[:, None] * V + v[None, :], mask=inside, other=0.0)
    o = tl.sum(values * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(o_ptr + at * V + v, o.to(o_ptr.dtype.element_ty), mask=v < V)


def n_parts(longest: int, programs: int) -> int:
    """A power of two. longest: upper bound of a block's keys. programs: without parts."""
    most = max(1, min(-(-longest // SHARE), PROGRAMS // programs))
    return 1 << (most.bit_length() - 1)


class Parts:
    """Where the programs of a block leave their values: in the result, or in `n` parts of it."""

    def __init__(self, like: Tensor, n_heads: int, value_width: int, n: int) -> None:
        """like: [T, ..], of the result's dtype."""
        self.n, self._heads, self._width = n, n_heads, value_width
        self.o = like.new_empty(len(like), n_heads * value_width)
        self.values = self.lse = self.o
        if n > 1:
            shape = (n, len(like), n_heads)
            self.values = like.new_empty(*shape, value_width, dtype=torch.float32)
            self.lse = self.values.new_empty(shape)

    def united(self) -> Tensor:
        """[T, H * V]."""
        if self.n > 1:
            n = len(self.o) * self._heads
            block = triton.next_power_of_2(self._width)
            tensors = (self.values, self.lse, self.o)
            _unite[(n,)](*tensors, n, V=self._width, BLOCK_V=block, PARTS=self.n, num_warps=1)
        return self.o
