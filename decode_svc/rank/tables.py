"""The batch of one verify step, derived from the device row table.

Positions, pool slots and bounds are recomputed each step into buffers that never move, so that a captured graph reads
them; nothing is carried over or corrected. `GroupBatch` is one bucket's share of the buffers.
Letters: B rows, G group tokens, T = B * G, W page-table width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from k3_kernels import drafts
from k3_kernels.reference.tables import verify_tables
from torch import Tensor

from decode_svc.ledger import Ledger
from decode_svc.rank.rows import DUMMY_ROW, RowTable
from k3.device import uploaded
from k3.model.batch import VerifyBatch


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Inputs of one step: the model's batch, and what judging the group needs."""

    verify: VerifyBatch
    rows_B: Tensor
    base_B: Tensor
    drafts_BK: Tensor
    draft_len_B: Tensor  # drafts that are real, the others are padding
    next_T: Tensor  # position of the token drawn from each row of logits


class TableBuffers:
    """Persistent inputs for up to `max_rows` rows."""

    def __init__(
        self,
        table: RowTable,
        ledger: Ledger,
        cp_rank: int,
        max_rows: int,
        group: int,
        whole: drafts.DeriveTables | None = None,
    ) -> None:
        """whole: derives everything as one operation."""
        self._whole = whole
        self._table = table
        self._ledger = ledger
        self._cp_rank = cp_rank
        self.group = group
        width, device = table.pages_RW.shape[1], table.device
        self._room = width * ledger.page_tokens  # keys a row can have on this rank
        n = max_rows * group

        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._chosen = ints(2, max_rows)
        self._rows, self._limits = self._chosen.unbind(0)
        self._draft_len = ints(max_rows)
        self._base, self._slots, self._columns = ints(max_rows), ints(max_rows), ints(max_rows)
        self._pages = ints(max_rows, width, dtype=torch.int32)
        self._tokens, self._slot_T, self._next_T = ints(n), ints(n), ints(n)
        self._bound_T = ints(n, dtype=torch.int32)
        self._offsets_G = torch.arange(group, device=device)

    def buffers(self) -> dict[str, Tensor]:
        """Everything that a recorded step reads or writes here."""
        return {
            "chosen": self._chosen,
            "draft_len": self._draft_len,
            "base": self._base,
            "slots": self._slots,
            "columns": self._columns,
            "table": self._pages,
            "ids": self._tokens,
            "slot": self._slot_T,
            "next": self._next_T,
            "bound": self._bound_T,
        }

    def choose(self, rows: Sequence[int], limits: Sequence[int] | None = None) -> None:
        """Set who takes part (padding with the dummy row included); stays until the next call.

        limits: drafts at most that each row's group holds; all that the row has by default.
        """
        n = len(rows)
        most = [self.group - 1] * n if limits is None else limits
        chosen = torch.tensor((tuple(rows), tuple(most)), dtype=torch.int64)
        self._chosen[:, :n].copy_(uploaded(chosen, self._chosen.device))
        rows_B = self._rows[:n]
        torch.index_select(self._table.pages_RW, 0, rows_B, out=self._pages[:n])
        torch.index_select(self._table.state_slot_R, 0, rows_B, out=self._slots[:n])

    def drafts(self, n: int) -> list[list[int]]:
        """The real drafts of the first `n` chosen rows, read from the device; waits for it."""
        rows_B = self._rows[:n]
        real = torch.minimum(self._table.draft_len_R[rows_B], self._limits[:n]).tolist()
        drafts = self._table.drafts_RK[rows_B].tolist()
        return [ids[:n_real] for ids, n_real in zip(drafts, real, strict=True)]

    def derive(self, n: int, max_len: int, group: int | None = None) -> GroupBatch:
        """Overwrite the first `n` rows' tables from the row table. max_len: upper bound of every row's length.

        group: tokens of each row, the most there is room for by default.
        """
        group = group or self.group
        rows_B, t = self._rows[:n], n * group
        if self._whole is not None:
            self._whole(self._source(n), self._tables(n, t), group)
        else:
            self._derive(n, group)
        batch = VerifyBatch(
            token_ids_T=self._tokens[:t],
            page_table_BW=self._pages[:n],
            slot_T=self._slot_T[:t],
            bound_T=self._bound_T[:t],
            state_slots_B=self._slots[:n],
            read_column_B=self._columns[:n],
            group=group,
            max_bound=min(self._ledger.local_len(max_len, self._cp_rank), self._room),
        )
        drafts_BK = self._tokens[:t].view(n, group)[:, 1:]
        base_B, draft_len_B = self._base[:n], self._draft_len[:n]
        return GroupBatch(batch, rows_B, base_B, drafts_BK, draft_len_B, self._next_T[:t])

    def _source(self, n: int) -> drafts.RowSource:
        table, ledger = self._table, self._ledger
        return drafts.RowSource(
            *(self._rows[:n], self._limits[:n], table.base_R, table.anchor_R),
            *(table.draft_len_R, table.read_column_R, table.drafts_RK, self._pages[:n]),
            *(ledger.page_tokens, ledger.cp, self._cp_rank),
        )

    def _tables(self, n: int, t: int) -> drafts.GroupTables:
        return drafts.GroupTables(
            *(self._tokens[:t], self._slot_T[:t], self._bound_T[:t], self._next_T[:t]),
            *(self._base[:n], self._columns[:n], self._draft_len[:n]),
        )

    def _derive(self, n: int, group: int) -> None:
        """Part by part."""
        table, rows_B, t = self._table, self._rows[:n], n * group
        base_B = torch.index_select(table.base_R, 0, rows_B, out=self._base[:n])
        torch.index_select(table.read_column_R, 0, rows_B, out=self._columns[:n])
        tokens_BG = self._tokens[:t].view(n, group)
        tokens_BG[:, 0] = table.anchor_R[rows_B]
        if group > 1:
            tokens_BG[:, 1:] = table.drafts_RK[rows_B, : group - 1]
        draft_len_B = torch.minimum(
            table.draft_len_R[rows_B], self._limits[:n], out=self._draft_len[:n]
        )
        is_real_BG = self._offsets_G[:group] <= draft_len_B.unsqueeze(1)
        is_real_BG = is_real_BG & (rows_B != DUMMY_ROW).unsqueeze(1)
        ledger = self._ledger
        position, slot, bound = verify_tables(
            base_B, self._pages[:n], is_real_BG, ledger.page_tokens, ledger.cp, self._cp_rank
        )
        self._slot_T[:t].copy_(slot)
        self._bound_T[:t].copy_(bound)
        torch.add(position, 1, out=self._next_T[:t])
