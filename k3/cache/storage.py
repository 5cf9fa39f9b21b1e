"""The pools of one rank: one tensor per `Field` of a `CacheLayout`, and the views the layers use.

Every pool is one contiguous, 4 KiB aligned tensor that is registered once and never moved or freed
before shutdown. Pages are page-major and slots head-major (`k3/cache/layout.py`), so a layer sees a
strided view of its pool. `tails` hold what a verify step keeps beyond the transferred convolution
window, `records` what the replay form keeps of its tokens; neither is ever registered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3.cache.layout import DRAFT_ROWS, CacheLayout, Field, Unit
from k3.errors import ConfigError
from k3.model.batch import StageCaches
from k3.model.layers import torch_dtype

ALIGNMENT = 4096


class Storage:
    """Allocated pools; `pools[field name]` is what the transfer registers."""

    def __init__(
        self,
        layout: CacheLayout,
        n_pages: int,
        n_slots: int,
        device: torch.device,
        *,
        n_rings: int = 0,
        fill_nan: bool = False,
    ) -> None:
        """n_pages, n_slots: ids are 0..n-1 (n_slots counts state slots, `columns` pool slots each); n_rings: of rows.

        fill_nan: fill with NaN instead of zeros, so that a read of memory nobody wrote shows.
        """
        if n_pages < 1 or n_slots < 1:
            raise ConfigError(f"n_pages={n_pages}, n_slots={n_slots}: both must be at least 1")
        self.layout = layout
        self.n_pages, self.n_slots = n_pages, n_slots
        counts = {Unit.PAGE: n_pages, Unit.SLOT: n_slots, Unit.RING: n_rings}
        fill = float("nan") if fill_nan else 0.0
        self.pools: dict[str, Tensor] = {
            field.name: _allocate(field, counts[field.unit], device).fill_(fill)
            for field in layout.fields
        }
        self._fill = fill
        rollback = layout.rollback
        self._tails = self._beside("conv", rollback.tail_shape)
        self._records = self._beside("kda", rollback.record_shape) if rollback.records else {}

    def _beside(self, name: str, shape: tuple[int, ...]) -> dict[int, Tensor]:
        """Per layer of a field a tensor [slots, *shape] of its dtype."""
        field = self.layout.field(name)
        if field is None:
            return {}
        pool = self.pools[name]
        whole = (len(field.layers), self.n_slots, *shape)
        tensors = torch.full(whole, self._fill, dtype=pool.dtype, device=pool.device)
        return dict(zip(field.layers, tensors, strict=True))

    @property
    def columns(self) -> int:
        """Pool slots of the recurrent state per state slot."""
        kda = self.layout.field("kda")
        return 1 if kda is None else kda.columns

    def caches(self) -> StageCaches:
        """Per-layer views of all pools, keyed by global layer index."""
        return StageCaches(
            latents=self._views("latent"),
            states=self._views("kda"),
            windows=self._views("conv"),
            tails=self._tails,
            columns=self.columns,
            records=self._records,
        )

    def _views(self, name: str) -> dict[int, Tensor]:
        """Layer axis: 1 within a page, 2 (after the heads) within a slot."""
        field = self.layout.field(name)
        if field is None:
            return {}
        axis = 1 if field.unit is Unit.PAGE else 2
        pool = self.pools[name]
        return {layer: pool.select(axis, i) for i, layer in enumerate(field.layers)}

    @property
    def draft(self) -> Tensor | None:
        """The drafter's rows, [units, ..., page_tokens, width], or None without a drafter on this stage."""
        return self.pools.get("draft")

    @property
    def draft_pages(self) -> Tensor | None:
        """Those of them that lie in pages; None where there are none."""
        paged = [f.name for f in self.layout.fields if f.unit is Unit.PAGE and f.name in DRAFT_ROWS]
        return self.pools[paged[0]] if paged else None

    def zero_tail(self, page: int, rows: int) -> None:
        """Zero the rows `rows ..` of a page in every page field: nothing unwritten leaves this rank."""
        for field in self.layout.fields:
            if field.unit is Unit.PAGE:
                self.pools[field.name][page, ..., rows:, :] = 0

    def copy_slot(self, source: int, target: int) -> None:
        """Copy what a state slot holds between steps: state of column 0 and convolution window."""
        for field in self.layout.fields:
            if field.unit is Unit.SLOT:
                pool, columns = self.pools[field.name], field.columns
                pool[target * columns].copy_(pool[source * columns])

    def zero_slot(self, slot: int) -> None:
        """Zero a state slot: all its columns, window, tail and records."""
        for field in self.layout.fields:
            if field.unit is Unit.SLOT:
                first = slot * field.columns
                self.pools[field.name][first : first + field.columns] = 0
        for beside in (*self._tails.values(), *self._records.values()):
            beside[slot] = 0


def _allocate(field: Field, n: int, device: torch.device) -> Tensor:
    """An aligned tensor [n * columns, *shape]; the allocation is a little larger than the tensor."""
    units = n * field.columns
    dtype = torch_dtype(field.dtype)
    raw = torch.empty(units * field.unit_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % ALIGNMENT
    aligned = raw[skip : skip + units * field.unit_bytes]
    return aligned.view(dtype).view(units, *field.shape)
