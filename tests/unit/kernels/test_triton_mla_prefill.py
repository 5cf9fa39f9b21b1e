"""Chunk attention in Triton's interpreter equals the reference: several requests, odd lengths, NaN behind them."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.reference import mla as reference
from k3_kernels.triton import mla_prefill
from torch import Tensor

from tests.compare import assert_close

PAGE = 8


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 3e-6), (torch.float16, 4e-3)], ids=str)
@pytest.mark.parametrize(
    "lengths, starts, heads, dims",
    [
        ((1,), (0,), 1, (16, 8, 4, 12)),
        ((5, 37), (70, 0), 3, (20, 24, 8, 10)),
        ((40, 1), (30, 9), 2, (16, 16, 16, 16)),
    ],
    ids=["first token", "second chunk beside a first", "both continue"],
)
def test_chunks_of_several_requests_equal_the_reference(
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    heads: int,
    dims: tuple[int, int, int, int],
    dtype: torch.dtype,
    atol: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads are expanded one or two at a time."""
    rank, nope, shared, value = dims
    cu_lens = tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))
    ends = [start + n for start, n in zip(starts, lengths, strict=True)]
    pages = [-(-end // PAGE) for end in ends]
    cache = torch.full((sum(pages) + 1, PAGE, rank + shared), float("nan"), dtype=dtype)
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)) + 1
    table = torch.zeros(len(ends), max(pages), dtype=torch.int32)
    for r, (end, own) in enumerate(zip(ends, order.split(pages), strict=True)):
        table[r, : len(own)] = own.to(torch.int32)
        flat = draw(end, rank + shared, seed=r, dtype=dtype)
        for i, page in enumerate(own.tolist()):
            part = flat[i * PAGE : (i + 1) * PAGE]
            cache[page, : len(part)] = part
    query = draw(cu_lens[-1], heads, nope + shared, seed=7, dtype=dtype)
    up = draw(heads, nope + value, rank, seed=8, dtype=dtype) * rank**-0.5
    scale = (nope + shared) ** -0.5
    monkeypatch.setattr(mla_prefill, "EXPANDED", 2 * max(ends) * (nope + value))
    got = mla_prefill.prefill(query, cache, table, cu_lens, starts, up, scale)
    exact = (x.double() for x in (query, cache.nan_to_num(0.0)))
    q, latents = exact
    expected = reference.prefill(q, latents, table, cu_lens, starts, up.double(), scale)
    assert got.dtype == dtype
    assert_close(got, expected, atol, "attention")
