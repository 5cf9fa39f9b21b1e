"""A random drafter over a ring of its own, by any operations: what tests of a backend's kernels compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from k3_kernels.api import DenseOps
from k3_kernels.drafts import Accepted, DraftPlace, DraftView
from torch import Tensor

from k3.config.resolve import EMBEDDED_MODEL
from k3.model.draft_ring import DraftRing
from k3.model.dspark import Drafter
from k3.model.dspark_spec import DraftSpec
from k3.model.spec import K3Spec
from k3.model.weights import Weights, open_folder
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import WHOLE

SLOTS, PLACES, PAGE = 5, 3, 8
WINDOW = PAGE * (PLACES - 1)


@dataclass
class World:
    """A drafter and a ring full of NaN."""

    drafter: Drafter
    ring: DraftRing

    @classmethod
    def of(
        cls,
        folder: Path,
        ops: DenseOps,
        dtype: torch.dtype,
        block: int,
        device: str = "cpu",
        places: int = PLACES,
    ) -> World:
        """Of a folder of `random_drafter` for the embedded model."""
        target = K3Spec.from_folder(EMBEDDED_MODEL)
        random = torch.Generator().manual_seed(3)
        table = torch.randn(target.vocab_size, target.hidden_size, generator=random)
        table = table.bfloat16().to(device, dtype)  # the same in every precision
        spec, where = DraftSpec.from_folder(folder), torch.device(device)
        weights = Weights(open_folder(folder), spec.tensors(confidence=False), dtype, where)
        drafter = Drafter(
            spec,
            WHOLE,
            solo_groups().shard,
            weights,
            draft_tokens=block,
            embed=lambda ids: table[ids],
            head=lambda x: (x @ table.T).float(),
            ops=ops,
        )
        shape = (SLOTS * places, *spec.place_shape(PAGE, 1))
        pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
        return cls(drafter, DraftRing(pool, places, PAGE * (places - 1)))

    def place(self, slot_R: Tensor) -> DraftPlace:
        return DraftPlace(self.ring.pool, self.ring.places, self.ring.window, slot_R)

    def write(
        self, taps_TXD: Tensor, slot_R: Tensor, rows_B: Tensor, start_B: Tensor, accepted_B: Tensor
    ) -> None:
        """Rows of groups by what the drafter offers, or part by part."""
        if self.drafter.rows is not None:
            accepted = Accepted(rows_B, start_B, accepted_B)
            return self.drafter.rows(taps_TXD, accepted, self.place(slot_R))
        group = len(taps_TXD) // len(rows_B)
        offset_G = torch.arange(group, device=start_B.device)
        position_BG = start_B.unsqueeze(1) + offset_G
        keep_BG = (offset_G <= accepted_B.unsqueeze(1)) & (rows_B != 0).unsqueeze(1)
        slot_BG = slot_R[rows_B].unsqueeze(1).expand_as(position_BG)
        position_T = position_BG.flatten()
        rows = self.drafter.context(taps_TXD, position_T)
        self.ring.write(rows, slot_BG.flatten(), position_T, keep_BG.flatten())
        return None

    def hidden(
        self, slot_B: Tensor, start_B: Tensor, base_B: Tensor, anchor_B: Tensor, bound: int = 0
    ) -> Tensor:
        """Finished slots of blocks, over the ring or over what was read. bound: of bases, if not the largest."""
        bound = bound or int(base_B.max())
        if self.drafter.reads_rings(len(slot_B)):
            view = DraftView(self.place(slot_B), slot_B, start_B, base_B, bound)
            return self.drafter.hidden_over(view, anchor_B)
        context = self.ring.read(slot_B, start_B, base_B, bound)
        return self.drafter.hidden(context, anchor_B, base_B)
