"""Speculation on one rank: context rows of what was accepted, then the next drafts, all into the row table.

The first drafts of a request are proposed when its row is opened, on the rows prefill handed over, or on none. Rows of
rejected drafts are never stored. Nothing here waits for the host.

Drafts are the drafter's best guesses, unless the acceptance rule weighs them against what they were drawn from: then
those of sampled requests are drawn under the request's own filters, and the distribution is kept beside each draft.
Letters: B rows, G group tokens, K drafts, T = B * G, X taps, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from k3_kernels.drafts import Accepted, DraftPlace, DraftView
from torch import Tensor

from decode_svc.rank.rows import DUMMY_ROW, RowTable
from k3.model.draft_ring import DraftRing
from k3.model.dspark import Choose, Drafter
from k3.sampling import Flavour, Purpose, Recipe, pick


class Drafting:
    """Owns the rings' content."""

    def __init__(self, drafter: Drafter, ring: DraftRing, table: RowTable) -> None:
        self._drafter = drafter
        self._ring = ring
        self._table = table
        self._place = DraftPlace(ring.pool, ring.places, ring.window, table.draft_slot_R)
        self._offsets_G = torch.arange(1 + drafter.draft_tokens, device=table.device)

    def advance(self, rows_B: Tensor, base_B: Tensor, accepted_B: Tensor, taps_TXD: Tensor) -> None:
        """After the rows were committed: store the rows of what was accepted. base_B: where the groups began."""
        if self._drafter.rows is not None:
            self._drafter.rows(taps_TXD, Accepted(rows_B, base_B, accepted_B), self._place)
            return
        offsets_G = self._offsets_G[: taps_TXD.shape[0] // rows_B.shape[0]]
        position_BG = base_B.unsqueeze(1) + offsets_G
        keep_BG = offsets_G <= accepted_B.unsqueeze(1)
        keep_BG = keep_BG & (rows_B != DUMMY_ROW).unsqueeze(1)
        slot_BG = self._table.draft_slot_R[rows_B].unsqueeze(1).expand_as(position_BG)
        position_T = position_BG.flatten()
        rows = self._drafter.context(taps_TXD, position_T)
        self._ring.write(rows, slot_BG.flatten(), position_T, keep_BG.flatten())

    def propose(self, rows_B: Tensor, max_base: int, flavour: Flavour) -> None:
        """Drafts for the rows' next groups. max_base: upper bound of their bases. flavour: of these rows."""
        table = self._table
        base_B, anchor_B, _, _, start_B, _, slot_B = table.words(rows_B).unbind(0)
        is_drawn = table.proposal_RKV is not None and flavour.sampled
        choose = self._drawing(rows_B, base_B, flavour) if is_drawn else None
        drafter = self._drafter
        if drafter.reads_rings(len(rows_B)):
            view = DraftView(self._place, slot_B, start_B, base_B, max_base)
            hidden_BKD = drafter.hidden_over(view, anchor_B)
        else:
            context = self._ring.read(slot_B, start_B, base_B, max_base)
            hidden_BKD = drafter.hidden(context, anchor_B, base_B)
        hidden_BKD = hidden_BKD[:, : drafter.draft_tokens]
        drafts_BK = drafter.draft(hidden_BKD, anchor_B, choose)
        table.propose(rows_B, drafts_BK)
        if table.confidence_RK is not None:
            previous_BK = torch.cat((anchor_B.unsqueeze(1), drafts_BK[:, :-1]), 1)
            logits_BK = drafter.confidence_logits(hidden_BKD, previous_BK)
            table.confidence_RK[rows_B] = logits_BK.sigmoid().float()

    def _drawing(self, rows_B: Tensor, base_B: Tensor, flavour: Flavour) -> Choose:
        """Draft i of each row from its distribution q, as it is kept for the judgement."""
        params, kept = self._table.params.select(rows_B), self._table.proposal_RKV
        recipe = Recipe(params, flavour)
        assert kept is not None

        def choose(i: int, logits_BV: Tensor) -> Tensor:
            q_BV = recipe.probabilities(logits_BV.unsqueeze(1)).squeeze(1).to(kept.dtype)
            kept[rows_B, i] = q_BV
            slot_1 = self._offsets_G[i : i + 1]
            position_B1 = base_B.unsqueeze(1) + 1 + slot_1
            u_B1 = params.uniform(position_B1, Purpose.DRAFT, slot_1)
            return pick(q_BV.double(), u_B1.squeeze(1))

        return choose
