"""Latent attention of verify groups by the native library equals the reference; nothing beyond a bound is looked at."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.cpu import library
from k3_kernels.cpu.attention import NativeAttention
from k3_kernels.reference import mla

from tests.compare import assert_close

pytestmark = pytest.mark.skipif(not library.is_built(), reason="no C++ compiler at install")


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize(
    "group, heads, width, value_width, page_tokens, bounds",
    [
        (1, 3, 21, 13, 4, [0, 9, 70]),
        (2, 2, 80, 64, 16, [0, 1, 130, 131]),
        (3, 1, 7, 7, 5, [64, 65, 0, 3, 4, 5]),
    ],
)
def test_decode_equals_the_reference_where_pools_are_nan_beyond_the_bounds(
    group: int,
    heads: int,
    width: int,
    value_width: int,
    page_tokens: int,
    bounds: list[int],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    generator = torch.Generator().manual_seed(width)
    n_rows, longest = len(bounds) // group, max(bounds)
    n_pages = -(-longest // page_tokens)
    pool = torch.full((n_rows * n_pages + 1, 2, page_tokens, width), torch.nan, dtype=dtype)
    cache = pool[:, 1]
    table = torch.randperm(n_rows * n_pages, generator=generator).to(torch.int32)
    table = table.view(n_rows, n_pages)
    ops = NativeAttention()
    for b in range(n_rows):
        n = max(bounds[b * group : (b + 1) * group])
        key = torch.arange(n)
        slot = table[b, key // page_tokens].long() * page_tokens + key % page_tokens
        latent = torch.randn(n + 1, width + 2, generator=generator, dtype=dtype)[:, 1:-1]
        ops.write(cache, torch.cat((slot, torch.tensor([-1]))), latent)
        table[b, -(-n // page_tokens) :] = -1
    q = torch.randn(len(bounds), heads, width, generator=generator, dtype=dtype)
    step = (table, torch.tensor(bounds, dtype=torch.int32), group, longest, page_tokens)
    o, lse = ops.decode(q, cache, ops.plan(*step), 0.3, value_width)
    expected, expected_lse = mla.decode(q, cache, mla.plan_decode(*step), 0.3, value_width)
    assert_close(o, expected, tolerance, "o")
    assert_close(lse, expected_lse, tolerance, "lse")
    assert not o.isnan().any()
