"""What one step runs over: `ChunkBatch` (prefill) and `VerifyBatch` (decode), and the caches they touch.

Letters: T tokens of the step, R requests, B rows, G = k + 1 tokens of a verify group (T = B * G),
W width of a page table, P tokens per page, S pool slots, H heads of this rank, D head dim.
A *pool slot of a token* is `page * P + offset`; a *state slot* is a request's recurrent storage,
`columns` consecutive pool slots of the `kda` field (column 0 is what prefill and transfers use).
Batches only describe; every tensor of a `VerifyBatch` lives in a persistent buffer that the caller
overwrites per step, so a captured graph stays valid.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Chunks of several requests, concatenated along T.

    token_ids_T: int64; read by the first stage only.
    cu_lens: R + 1 offsets into T; request r owns `[cu_lens[r], cu_lens[r + 1])`, never empty.
    starts: tokens of each request already in the caches (0: its first chunk).
    page_table_RW: int32 page ids; the first ceil((start + length) / P) of a row are read.
    slot_T: int64 pool slot each token's latent is written to.
    read_slots: state slot each request continues from; -1 starts from zeros.
    write_slots: state slot that receives the state after the chunk; never -1.
    """

    token_ids_T: Tensor
    cu_lens: tuple[int, ...]
    starts: tuple[int, ...]
    page_table_RW: Tensor
    slot_T: Tensor
    read_slots: tuple[int, ...]
    write_slots: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """T."""
        return self.cu_lens[-1]


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """One verify group per row: the anchor and k drafts, all rows G wide.

    token_ids_T: int64 [B * G].
    page_table_BW: int32 page ids on this rank.
    slot_T: int64 [B * G]; -1: another rank owns the token, or the row is padding; not written.
    bound_T: int32 [B * G]; keys of this rank the token may see, itself included if it is here.
    state_slots_B: int64; padding rows name a slot that no request uses.
    read_column_B: int64; group token of the last step whose state is the committed one (0..k), -1 in a slot that was
      just filled by a chunk or a transfer.
    group: G.
    max_bound: host upper bound of `bound_T`, at most W * P; the reference reads no page beyond it.
    """

    token_ids_T: Tensor
    page_table_BW: Tensor
    slot_T: Tensor
    bound_T: Tensor
    state_slots_B: Tensor
    read_column_B: Tensor
    group: int
    max_bound: int

    @property
    def n_tokens(self) -> int:
        """T = B * G."""
        return self.token_ids_T.shape[0]


Batch = ChunkBatch | VerifyBatch


@dataclass(frozen=True, slots=True)
class StageCaches:
    """Per-layer strided views of one rank's pools, keyed by global layer index.

    latents: [pages, P, C + R] of MLA layers.
    states: [S * columns, H, D, D] recurrent state, V-first, of KDA layers.
    windows: [S, H, 3 (q, k, v), D, w - 1] last convolution inputs, oldest first.
    tails: [S, H, 3, G - 1, D] what a verify step holds beyond them. Columns `a .. a + w - 2`
      of window ++ tail are the window after `a` accepted drafts. Never transferred.
    columns: pool slots of `states` per state slot.
    records: [S, H, 3 (k, u, g), G, D] what a verify step holds instead of a state per token; empty with snapshots.
    """

    latents: dict[int, Tensor]
    states: dict[int, Tensor]
    windows: dict[int, Tensor]
    tails: dict[int, Tensor]
    columns: int = 1
    records: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
