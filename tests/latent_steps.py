# ruff: noqa: TID251  (asked at collection, before any device is opened)
"""Steps of latent attention for kernel tests: bounds per token, pages in random order, NaN in every unwritten slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from k3_kernels.reference import mla as reference
from k3_kernels.triton.mla_ops import TritonAttention
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SHAPES = {
    "one token, one key": [[1]],
    "a page less one, a page, a page and one": [[63], [64], [65]],
    "a group over a page border": [[63, 64, 65], [1, 2, 3]],
    "bounds that stand still, as on a helix rank": [[64, 64, 64, 65, 66], [7, 7, 8, 9, 9]],
    "first tokens without keys": [[0, 0, 1, 2], [0, 1, 2, 3]],
    "a row without keys between others": [[130, 131], [0, 0], [5, 6]],
    "padding tokens behind real ones": [[70, 71, 0, 0], [0, 0, 0, 0]],
    "eight tokens, uneven rows": [[i + 193 for i in range(8)], [i + 1 for i in range(8)]],
}


@dataclass(frozen=True, slots=True)
class Case:
    """One step: bounds per row and group token; every other slot of the pool holds NaN."""

    q_THK: Tensor
    cache_PTK: Tensor
    table_BW: Tensor
    bound_T: Tensor
    group: int

    def reference(self, scale: float, value_width: int) -> tuple[Tensor, Tensor]:
        """In float64."""
        plan = reference.plan_decode(
            self.table_BW, self.bound_T, self.group, int(self.bound_T.max()), self.page_tokens
        )
        return reference.decode(
            self.q_THK.double(), self.cache_PTK.double(), plan, scale, value_width
        )

    def triton(self, ops: TritonAttention, scale: float, width: int) -> tuple[Tensor, Tensor]:
        """As the model calls it; the host's bound is loose."""
        plan = ops.plan(self.table_BW, self.bound_T, self.group, 10**6, self.page_tokens)
        return ops.decode(self.q_THK, self.cache_PTK, plan, scale, width)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.cache_PTK.shape[1]


def step(
    bounds: list[list[int]],
    heads: int,
    latent: int = 32,
    shared: int = 16,
    page_tokens: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layers: int = 3,
) -> Case:
    """Pages in random order, the middle one of `layers` layers' page-major pool."""
    generator = torch.Generator().manual_seed(seed)
    width, group = latent + shared, len(bounds[0])
    pages = [-(-max(row) // page_tokens) for row in bounds]
    n_pages = sum(pages) + 2
    order = torch.randperm(n_pages, generator=generator).tolist()
    pool = torch.full((n_pages, layers, page_tokens, width), float("nan"), dtype=dtype)
    cache = pool[:, layers // 2]
    table = torch.full((len(bounds), max(*pages, 1) + 1), -1, dtype=torch.int32)
    for b, row in enumerate(bounds):
        mine = [order.pop() for _ in range(pages[b])]
        table[b, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        for position in range(max(row)):
            key = torch.randn(width, generator=generator).to(dtype)
            cache[mine[position // page_tokens], position % page_tokens] = key
    q = torch.randn(len(bounds) * group, heads, width, generator=generator).to(dtype)
    bound = torch.tensor(bounds, dtype=torch.int32).flatten()
    moved = (x.to(DEVICE) for x in (q, pool, table, bound))
    q, pool, table, bound = moved
    return Case(q, pool[:, layers // 2], table, bound, group)
