"""Where context rows of a drafter lie: pages at prefill, one ring per slot at decode. Both are written the same way.

A pool is `[units, ..., P tokens, width]`: a unit is a page at prefill, and at decode one of the Q page places of a
slot's ring. The row of position p lies in row `p % (Q * P)` of its slot's ring, so a page lands in place `page % Q` as
a whole. Slot 0 is nobody's: what must not be written goes there. The ring is longer than the window that is read by at
least one verify group, so that a step never overwrites what the next one reads.

Letters: T tokens, B requests, N = rows of the places that are looked at, P tokens per page, Q places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCRATCH_SLOT = 0


@dataclass(frozen=True, slots=True)
class Context:
    """Rows a block may look at. rows: [B, N, ...] zero where not seen; seen_BN: bool."""

    rows: Tensor
    seen_BN: Tensor

    def layer(self, layer: int, flavour: str) -> Tensor:
        """One layer's rows: [B, N, W] or [B, N, H, 2, dim]."""
        return self.rows[:, :, layer] if flavour == "mla" else self.rows[:, :, :, layer]


def write_rows(pool: Tensor, unit_T: Tensor, offset_T: Tensor, rows: Tensor) -> None:
    """Put the row of each token at `offset` of its unit."""
    pool.movedim(-2, 1)[unit_T, offset_T] = rows


@dataclass(frozen=True, slots=True)
class DraftRing:
    """pool: [slots * Q, ..., P, width]. window: positions before the anchor that are read."""

    pool: Tensor
    places: int
    window: int

    @property
    def page_tokens(self) -> int:
        """P."""
        return self.pool.shape[-2]

    def write(self, rows: Tensor, slot_T: Tensor, position_T: Tensor, keep_T: Tensor) -> None:
        """Store the rows of the tokens in `keep_T` at their absolute positions; the others go to the scratch slot."""
        p = self.page_tokens
        unit = slot_T * self.places + position_T // p % self.places
        unit = torch.where(keep_T, unit, SCRATCH_SLOT * self.places)
        write_rows(self.pool, unit, position_T % p, rows)

    def read(self, slot_B: Tensor, start_B: Tensor, base_B: Tensor, max_base: int) -> Context:
        """What blocks with anchors at `base` see: positions from `start`, at most `window`, before the anchor.

        max_base: upper bound of every base; places beyond it are not looked at.
        """
        p, q = self.page_tokens, self.places
        n = min(q, max(1, -(-max_base // p)))
        rings = self.pool.unflatten(0, (-1, q))[:, :n].movedim(-2, 2)  # [slots, n, P, ...]
        rows = rings[slot_B].flatten(1, 2)
        index_N = torch.arange(n * p, device=rows.device)
        newest_B1 = base_B.unsqueeze(1) - 1
        position_BN = newest_B1 - (newest_B1 - index_N) % (q * p)
        oldest_B1 = torch.maximum(start_B, base_B - self.window).clamp(min=0).unsqueeze(1)
        seen_BN = position_BN >= oldest_B1
        shape = (*seen_BN.shape, *[1] * (rows.dim() - 2))
        return Context(torch.where(seen_BN.view(shape), rows, 0), seen_BN)
