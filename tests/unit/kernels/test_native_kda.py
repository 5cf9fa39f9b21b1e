"""A verify group of a KDA layer by the native library equals the reference, in both forms, on odd shapes.

What a step must not look at is NaN: other slots, state columns, tail columns and records beyond the read column.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from k3_kernels.cpu import library
from k3_kernels.cpu.ops import NativeKda
from k3_kernels.reference.group import GroupCache, GroupRule, verify
from torch import Tensor

from tests.compare import assert_close

pytestmark = pytest.mark.skipif(not library.is_built(), reason="no C++ compiler at install")
HEADS = 2


class Case:
    """Rows with the given read columns, in slots of shuffled order; `records` tokens per slot, or a state per token."""

    def __init__(
        self,
        dtype: torch.dtype,
        group: int,
        dim: int,
        width: int,
        bound: float | None,
        read: list[int],
        *,
        records: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(group + dim)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype)

        n_rows, columns = len(read), 1 if records else group
        self.slots = torch.arange(n_rows, 0, -1)
        self.read = torch.tensor(read)
        taps = draw(HEADS, 3, width, dim).transpose(-1, -2)
        self.rule = GroupRule(taps, draw(HEADS, dim), draw(HEADS).exp(), bound, 1e-6)
        flat = draw(n_rows * group, HEADS * 3 * dim + 7)[:, 3 : 3 + HEADS * 3 * dim]
        self.u = flat.view(-1, HEADS, 3, dim).unflatten(0, (n_rows, group))
        self.raw = draw(n_rows, group, HEADS, dim)
        self.beta = draw(n_rows * group, HEADS + 2)[:, 1 : 1 + HEADS].unflatten(0, (n_rows, group))
        n, nan = n_rows + 2, torch.nan
        states = torch.full((n * columns, 2, HEADS, dim, dim), nan, dtype=dtype)[:, 1]
        windows = torch.full((n, 2, HEADS, 3, 3, dim, width - 1), nan, dtype=dtype)[:, 1, :, 1]
        tails = torch.full((n, HEADS, 3, max(group, records) - 1, dim), nan, dtype=dtype)
        kept = torch.full((n, HEADS, 3, records, dim), nan, dtype=dtype) if records else None
        for slot, column in zip(self.slots.tolist(), read, strict=True):
            own = slot * columns + (0 if records else max(column, 0))
            states[own] = draw(HEADS, dim, dim)
            windows[slot] = draw(HEADS, 3, dim, width - 1)
            tails[slot, :, :, : max(column, 0)] = draw(HEADS, 3, max(column, 0), dim)
            if kept is not None:
                kept[slot, :, :, : column + 1] = draw(HEADS, 3, column + 1, dim)
                kept[slot, :, 2] = -kept[slot, :, 2].abs()
        self.cache = GroupCache(states, windows, tails, columns, kept)

    def run(self, operation: object) -> dict[str, Tensor]:
        """Output and pools afterwards, of a copy."""
        c = self.cache
        records = None if c.records is None else c.records.clone()
        cache = replace(
            c, states=c.states.clone(), windows=c.windows.clone(), tails=c.tails.clone()
        )
        cache = replace(cache, records=records)
        assert callable(operation)
        o = operation(self.u, self.raw, self.beta, self.rule, cache, self.slots, self.read)
        found = {"o": o, "states": cache.states, "windows": cache.windows, "tails": cache.tails}
        return found if records is None else {**found, "records": records}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize(
    "group, dim, width, bound, read, records",
    [
        (1, 7, 4, None, [0, -1, 0], 0),
        (3, 8, 4, -5.0, [-1, 2], 0),
        (4, 20, 2, -5.0, [0, 3, -1], 0),
        (2, 20, 3, None, [2, -1], 4),
        (8, 32, 4, -5.0, [7, 0, 3], 8),
    ],
)
def test_a_verify_group_equals_the_reference(
    group: int,
    dim: int,
    width: int,
    bound: float | None,
    read: list[int],
    records: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    case = Case(dtype, group, dim, width, bound, read, records=records)
    expected = case.run(verify)
    for name, got in case.run(NativeKda().group).items():
        assert_close(got, expected[name], tolerance, name)
    assert not expected["o"].isnan().any()
