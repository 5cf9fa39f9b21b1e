"""The device row table: the truth of every running request.

A row holds the anchor and its position (`base`), the drafts proposed for the next group, the read column (group token
whose KDA state is the committed one) and where the caches lie. A step reads it, and overwrites it once the group is
judged; the host never sends a position after the row was opened. Row 0 is a dummy for padding and warm-up.

What drawing needs of a request lies in tables too, by row: numbers, edits, and under the acceptance rules that ask for
it the distribution each draft was drawn from. The host's own copy only answers questions about a composition.
Letters: R rows, W page-table width, K drafts, B rows of a step, G group tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from k3_kernels.draws import Draw
from torch import Tensor

from decode_svc.rank.grammar import Grammar
from k3.device import uploaded_together
from k3.edits import EditTables, TokenCounts
from k3.rpc.convert import logprobs_from_proto, sampling_from_proto, stop_from_proto
from k3.sampling import Flavour, Params, Recipe, RowSampling
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
        self,
        max_rows: int,
        width: int,
        draft_tokens: int,
        vocab_size: int,
        device: torch.device,
        proposals: torch.dtype | None = None,
        confident: bool = False,
    ) -> None:
        """proposals: precision of the distributions drafts were drawn from; None where nobody asks for them.

        confident: keep how far the drafter trusts each draft.
        """
        n_rows = max_rows + 1
        self.device = device
        self.vocab_size = vocab_size
        self._words = torch.zeros(7, n_rows, dtype=torch.int64, device=device)
        (
            self.base_R,
            self.anchor_R,
            self.draft_len_R,
            self.read_column_R,
            self.draft_start_R,
            self.state_slot_R,
            self.draft_slot_R,
        ) = self._words.unbind(0)
        self.read_column_R.fill_(JUST_FILLED)
        self.draft_start_R.fill_(NO_ROWS)
        self.state_slot_R.fill_(DUMMY_SLOT)
        self.drafts_RK = torch.zeros(n_rows, draft_tokens, dtype=torch.int64, device=device)
        self.pages_RW = torch.full((n_rows, width), NO_PAGE, dtype=torch.int32, device=device)
        self.params = Params.empty(n_rows, device)
        self.edits = EditTables(n_rows, vocab_size, device)
        self.confidence_RK = None
        if confident:
            self.confidence_RK = torch.zeros(n_rows, draft_tokens, device=device)
        self.proposal_RKV = None
        if proposals is not None:
            shape = (n_rows, draft_tokens, vocab_size)
            self.proposal_RKV = torch.zeros(shape, dtype=proposals, device=device)
        self.version = 0
        self._sampling: dict[int, RowSampling] = {}
        self._grammars: dict[int, Grammar] = {}
        self._epochs: dict[int, int] = {}
        self._n_drafts: dict[int, int] = {}

    def buffers(self) -> dict[str, Tensor]:
        """Everything that a recorded step reads or writes here."""
        found = {
            "words": self._words,
            "drafts": self.drafts_RK,
            "pages": self.pages_RW,
            "reals": self.params.reals,
            "whole": self.params.whole,
            **self.edits.buffers(),
        }
        kept = {"proposals": self.proposal_RKV, "confidence": self.confidence_RK}
        return found | {name: tensor for name, tensor in kept.items() if tensor is not None}

    @property
    def n_confidences(self) -> int:
        """Drafts of a row whose confidence is kept."""
        return 0 if self.confidence_RK is None else self.confidence_RK.shape[1]

    def open(self, row: plan_pb2.OpenRow) -> None:
        """A request takes the row; its caches are complete. Raises ValueError when it does not fit the table."""
        self._check(row)
        words = (
            row.base,
            row.anchor,
            row.draft_len,
            JUST_FILLED,
            0 if row.draft_valid else row.base,
            row.state_slot,
            row.draft_slot if row.HasField("draft_slot") else row.state_slot,
        )
        pages = [*row.pages, *[NO_PAGE] * (self.pages_RW.shape[1] - len(row.pages))]
        sampling = self._row_sampling(row)
        numbers = (
            torch.tensor(words, dtype=torch.int64),
            *Params.numbers([sampling]),
            torch.tensor(pages, dtype=torch.int32),
        )
        words_7, reals, whole, pages_W = uploaded_together(numbers, self.device)
        self._words[:, row.row] = words_7
        self.pages_RW[row.row] = pages_W
        self.params.put(row.row, Params(reals, whole))
        self.edits.put(
            row.row, sampling.params, sampling.end_ids, sampling.banned_before, self._counts(row)
        )
        self._epochs[row.row] = row.epoch
        self._n_drafts[row.row] = row.draft_len
        self._sampling[row.row] = sampling
        self._grammars.pop(row.row, None)
        self.version += 1

    def _check(self, row: plan_pb2.OpenRow) -> None:
        width = self.pages_RW.shape[1]
        if not DUMMY_ROW < row.row < self.base_R.shape[0] or len(row.pages) > width:
            raise ValueError(
                f"row {row.row} with {len(row.pages)} pages: the table has rows 1..{self.base_R.shape[0] - 1} "
                f"of {width} pages; front and rank disagree about the configuration"
            )
        if row.draft_len > self.drafts_RK.shape[1]:
            raise ValueError(
                f"row {row.row} with draft_len={row.draft_len}: groups hold {self.drafts_RK.shape[1]} drafts; "
                "front and rank disagree about the configuration"
            )
        if row.grammar:
            raise ValueError(
                f"row {row.row} has a compiled grammar of {len(row.grammar)} bytes and no compiler of this version "
                "reads it; the front must reject such requests"
            )

    def _row_sampling(self, row: plan_pb2.OpenRow) -> RowSampling:
        return RowSampling(
            sampling_from_proto(row.sampling),
            stop_from_proto(row.stop).end_ids,
            logprobs_from_proto(row.logprobs),
            # the anchor is the newest of the outputs and sits at `base`
            output_start=row.base + 1 - len(row.output_ids),
        )

    def _counts(self, row: plan_pb2.OpenRow) -> TokenCounts | None:
        if not sampling_from_proto(row.sampling).needs_counts:
            return None
        return TokenCounts(
            self.vocab_size,
            prompt_ids=row.prompt_ids,
            output_ids=row.output_ids,
            device=self.device,
        )

    def constrain(self, row: int, epoch: int, grammar: Grammar) -> None:
        """From now on the row draws what `grammar` allows; it has seen the output up to the anchor.

        A grammar outranks `min_tokens`: where only an end may follow, the end is drawn.
        """
        self.check_epoch(row, epoch)
        self._grammars[row] = grammar
        self.edits.ends_RV[row] = False
        self.version += 1

    def close(self, row: int, epoch: int) -> None:
        """The request leaves; a row that has been taken by a newer one is left alone."""
        if self._epochs.get(row) != epoch:
            return
        del self._epochs[row], self._sampling[row], self._n_drafts[row]
        self._grammars.pop(row, None)
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

    def grammar(self, row: int) -> Grammar | None:
        """What the row's request may draw, where something limits it."""
        return self._grammars.get(row)

    def flavour(self, rows: Sequence[int]) -> Flavour:
        """What drawing these rows together needs."""
        masks = any(row in self._grammars for row in rows)
        return Flavour.of([self.sampling(row) for row in rows], masks=masks)

    def recipe(self, rows_B: Tensor, flavour: Flavour, by: Draw | None = None) -> Recipe:
        """How these rows are drawn, read from the tables. by: as in `Recipe`."""
        params = self.params.select(rows_B)
        if not flavour.edits:
            return Recipe(params, flavour, by=by)
        edits = self.edits.select(rows_B, bias=flavour.bias, ban=flavour.ban, counts=flavour.counts)
        return Recipe(params, flavour, edits, by)

    def words(self, rows_B: Tensor) -> Tensor:
        """A copy of what `base_R` to `draft_slot_R` say about some rows, [7, B] in that order."""
        return self._words.index_select(1, rows_B)

    def commit(self, rows_B: Tensor, base_B: Tensor, accepted_B: Tensor, bonus_B: Tensor) -> None:
        """Overwrite the rows after a group was judged.

        base_B: the positions this step started from; accepted_B: drafts accepted, 0..k; bonus_B: the new anchor.
        """
        self.base_R[rows_B] = base_B + accepted_B + 1
        self.anchor_R[rows_B] = bonus_B
        self.read_column_R[rows_B] = accepted_B
        self.base_R[DUMMY_ROW].zero_()

    def propose(self, rows_B: Tensor, drafts_BK: Tensor) -> None:
        """Overwrite the drafts that the next group checks."""
        self.drafts_RK[rows_B] = drafts_BK
