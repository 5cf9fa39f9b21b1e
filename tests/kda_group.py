"""Random inputs of a KDA verify group, for holding kernels against `reference.group` on CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from k3_kernels.reference import group as reference
from k3_kernels.reference.group import GroupCache, GroupRule
from torch import Tensor

from tests.compare import assert_close

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Shape:
    """kept: tokens that fit into tails and records (0: no records). lower_bound None: a softplus gate."""

    rows: int
    group: int
    heads: int
    dim: int
    width: int = 4
    kept: int = 8
    lower_bound: float | None = -5.0


@dataclass(frozen=True, slots=True)
class Group:
    """Arguments of one call; slots that no row names, and all that must not be read, are NaN."""

    u: Tensor
    raw: Tensor
    beta: Tensor
    rule: GroupRule
    cache: GroupCache
    slots: Tensor
    column: Tensor

    @classmethod
    def draw(
        cls, shape: Shape, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> Group:
        """Views as the model passes them: rows of a wider projection, one layer of a slot-major pool."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*size: int, of: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(*size, generator=generator).to(device, of)

        b, g, h, d, w = shape.rows, shape.group, shape.heads, shape.dim, shape.width
        n_slots = b + 2
        wide = torch.full((b, g, h * 3 * d + 8), NAN, dtype=dtype, device=device)
        u = wide[..., : h * 3 * d].unflatten(-1, (h, 3, d))
        u.copy_(draw(b, g, h, 3, d))
        slots = torch.randperm(n_slots, generator=generator)[:b]
        column = torch.randint(-1, max(shape.kept, 1), (b,), generator=generator)
        states = torch.full((n_slots, h, 2, d, d), NAN, device=device)[:, :, 1]
        windows = torch.full((n_slots, h, 2, 3, d, w - 1), NAN, dtype=dtype, device=device)[:, :, 1]
        tails = torch.full(
            (n_slots, h, 3, max(shape.kept - 1, 0), d), NAN, dtype=dtype, device=device
        )
        records = torch.full((n_slots, h, 3, max(shape.kept, 1), d), NAN, device=device)
        for row in range(b):
            slot, a = int(slots[row]), int(column[row])
            states[slot] = draw(h, d, d)
            windows[slot] = draw(h, 3, d, w - 1, of=dtype)
            tails[slot, :, :, : max(a, 0)] = draw(h, 3, max(a, 0), d, of=dtype)
            record = draw(h, 3, a + 1, d)
            record[:, 2] = -record[:, 2].abs()
            records[slot, :, :, : a + 1] = record
        conv = draw(h, 3, w, d).transpose(-1, -2)
        rule = GroupRule(conv, draw(h, d), draw(h).exp(), shape.lower_bound, 1e-6)
        cache = GroupCache(states, windows, tails, 1, records if shape.kept else None)
        arguments = (draw(b, g, h, d, of=dtype), draw(b, g, h, of=dtype), rule, cache)
        return cls(u, *arguments, slots.to(device), column.to(device))

    def copy(self, dtype: torch.dtype | None = None) -> Group:
        """With caches of its own; floating tensors in `dtype`."""

        def of(x: Tensor) -> Tensor:
            return x.clone() if dtype is None else x.to(dtype, copy=True)

        c, r = self.cache, self.rule
        records = None if c.records is None else of(c.records)
        return replace(
            self,
            u=of(self.u) if dtype else self.u,
            raw=of(self.raw),
            beta=of(self.beta),
            rule=GroupRule(of(r.conv_HSDw), of(r.bias_HD), of(r.decay_H), r.lower_bound, r.eps),
            cache=GroupCache(of(c.states), of(c.windows), of(c.tails), 1, records),
        )

    def expected(self) -> tuple[Tensor, GroupCache]:
        """Output and caches in float64."""
        exact = self.copy(torch.float64)
        o = reference.verify(
            exact.u, exact.raw, exact.beta, exact.rule, exact.cache, exact.slots, exact.column
        )
        return o, exact.cache


def assert_same(
    got: tuple[Tensor, GroupCache], want: tuple[Tensor, GroupCache], atol: float
) -> None:
    """Output and everything kept; NaN must be where it is expected, so nothing else was written."""
    assert_close(got[0], want[0], atol, "o")
    for part in ("states", "windows", "tails"):
        assert_close(getattr(got[1], part), getattr(want[1], part), atol, part)
    if got[1].records is not None and want[1].records is not None:
        assert_close(got[1].records, want[1].records, atol, "records")
