"""The device row table: the truth of every running request.

A row holds the anchor and its position (`base`), the drafts proposed for the next group, the read column (group token
whose KDA state is the committed one) and where the caches lie. A step reads it, and overwrites it once the group is
judged; the host never sends a position after the row was opened. Row 0 is a dummy for padding and warm-up.

Beside the tensors, per row, what its drawing needs: a `RowSampling`, and token counts only where penalties ask for
them. Letters: R rows, W page-table width, K drafts, B rows of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3.rpc.convert import logprobs_from_proto, sampling_from_proto, stop_from_proto
from k3.sampling import RowSampling, TokenCounts
from k3.types import SamplingParams
from k3.v1 import plan_pb2

DUMMY_ROW = 0
DUMMY_SLOT = 0
NO_PAGE = -1  # beyond a request's pages: never written
JUST_FILLED = -1  # read column of a state that no verify group has touched
NO_ROWS = 1 << 62  # first position with a draft row, of a row that has none
DUMMY = RowSampling(SamplingParams(temperature=0.0))


class RowTable:
    """Rows 0..max_rows. `version` grows with every change of who holds a row."""

    def __init__(
        self, max_rows: int, width: int, draft_tokens: int, vocab_size: int, device: torch.device
    ) -> None:
        n_rows = max_rows + 1
        self.device = device
        self.vocab_size = vocab_size
        self.base_R = torch.zeros(n_rows, dtype=torch.int64, device=device)
        self.anchor_R = torch.zeros(n_rows, dtype=torch.int64, device=device)
        self.drafts_RK = torch.zeros(n_rows, draft_tokens, dtype=torch.int64, device=device)
        self.draft_len_R = torch.zeros(n_rows, dtype=torch.int64, device=device)
        self.read_column_R = torch.full((n_rows,), JUST_FILLED, dtype=torch.int64, device=device)
        self.draft_start_R = torch.full((n_rows,), NO_ROWS, dtype=torch.int64, device=device)
        self.state_slot_R = torch.full((n_rows,), DUMMY_SLOT, dtype=torch.int64, device=device)
        self.pages_RW = torch.full((n_rows, width), NO_PAGE, dtype=torch.int32, device=device)
        self.version = 0
        self._sampling: dict[int, RowSampling] = {}
        self._counts: dict[int, TokenCounts] = {}
        self._epochs: dict[int, int] = {}
        self._n_drafts: dict[int, int] = {}

    def open(self, row: plan_pb2.OpenRow) -> None:
        """A request takes the row; its caches are complete. Raises ValueError when it does not fit the table."""
        width = self.pages_RW.shape[1]
        if not DUMMY_ROW < row.row < self.base_R.shape[0] or len(row.pages) > width:
            raise ValueError(
                f"row {row.row} with {len(row.pages)} pages: the table has rows 1..{self.base_R.shape[0] - 1} "
                f"of {width} pages; front and rank disagree about the configuration"
            )
        self.base_R[row.row] = row.base
        self.anchor_R[row.row] = row.anchor
        self.draft_len_R[row.row] = row.draft_len
        self.draft_start_R[row.row] = 0 if row.draft_valid else row.base
        self.read_column_R[row.row] = JUST_FILLED
        self.state_slot_R[row.row] = row.state_slot
        pages = torch.tensor(row.pages, dtype=torch.int32, device=self.device)
        self.pages_RW[row.row] = NO_PAGE
        self.pages_RW[row.row, : len(row.pages)] = pages
        self._epochs[row.row] = row.epoch
        self._n_drafts[row.row] = row.draft_len
        self._sampling[row.row] = self._row_sampling(row)
        if self._sampling[row.row].params.needs_counts:
            self._counts[row.row] = TokenCounts(
                self.vocab_size,
                prompt_ids=row.prompt_ids,
                output_ids=row.output_ids,
                device=self.device,
            )
        self.version += 1

    def _row_sampling(self, row: plan_pb2.OpenRow) -> RowSampling:
        return RowSampling(
            sampling_from_proto(row.sampling),
            stop_from_proto(row.stop).end_ids,
            logprobs_from_proto(row.logprobs),
            # the anchor is the newest of the outputs and sits at `base`
            output_start=row.base + 1 - len(row.output_ids),
        )

    def close(self, row: int, epoch: int) -> None:
        """The request leaves; a row that has been taken by a newer one is left alone."""
        if self._epochs.get(row) != epoch:
            return
        del self._epochs[row], self._sampling[row], self._n_drafts[row]
        self._counts.pop(row, None)
        self.version += 1

    def check_epoch(self, row: int, epoch: int) -> None:
        """Raise ValueError unless the row belongs to this incarnation: front and rank have drifted apart."""
        if self._epochs.get(row) != epoch:
            raise ValueError(
                f"row {row} epoch {epoch}: the table holds epoch {self._epochs.get(row)}"
            )

    def sampling(self, row: int) -> RowSampling:
        """How the row's request is drawn."""
        return self._sampling[row] if row != DUMMY_ROW else DUMMY

    def n_drafts(self, row: int) -> int:
        """Drafts of the row's groups that are real; the others are padding."""
        return self._n_drafts[row]

    def counts(self, row: int) -> TokenCounts | None:
        """Token counts of a request with penalties."""
        return self._counts.get(row)

    def commit(self, rows_B: Tensor, base_B: Tensor, accepted_B: Tensor, bonus_B: Tensor) -> None:
        """Overwrite the rows after a group was judged.

        base_B: the positions this step started from; accepted_B: drafts accepted, 0..k; bonus_B: the new anchor.
        """
        self.base_R[rows_B] = base_B + accepted_B + 1
        self.anchor_R[rows_B] = bonus_B
        self.read_column_R[rows_B] = accepted_B
        self.base_R[DUMMY_ROW] = 0

    def propose(self, rows_B: Tensor, drafts_BK: Tensor) -> None:
        """Overwrite the drafts that the next group checks."""
        self.drafts_RK[rows_B] = drafts_BK
