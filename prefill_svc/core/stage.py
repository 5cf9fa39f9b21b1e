"""The rank's side of one prefill step: a plan's chunks through this stage's layers, and what the last stage answers.

`ChunkStage.run` receives the frame of the stage before (none on the first), runs the layers, sends the frame on, and
on the last stage draws the first token of every prompt that ends and the log probabilities of prompt tokens where
asked for. Rows beyond the end of a prompt are zeroed in its last page, so that nothing unwritten leaves this rank.
The stage knows nothing of requests between steps: a chunk carries all there is to know.

Letters: T tokens of the step, R chunks, W width of a page table, P tokens per page,
N finished rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from k3_kernels import draws
from torch import Tensor

from k3.cache.storage import Storage
from k3.model.batch import ChunkBatch
from k3.model.draft_ring import DraftRing, write_rows
from k3.model.dspark import DraftContext
from k3.model.k3 import Stage
from k3.parallel.frame import Frame
from k3.parallel.relay import Relay
from k3.sampling import RowSampling, TokenCounts, sample, with_logprobs
from k3.types import LogprobParams, TokenEvent


@dataclass(frozen=True, slots=True)
class FirstToken:
    """How the token after a prompt is drawn.

    prompt_ids, output_ids: what penalties count; empty when the parameters need no counts.
    """

    sampling: RowSampling
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StageChunk:
    """One chunk as this rank needs it.

    start: tokens in the caches before it. pages: of the request from position 0, enough for the chunk's end.
    read_slot: state slot to continue from, -1 = zero state. first: set when the chunk ends its prompt. copy_slot: state
    slot that gets a copy of the state after it.
    prompt_logprobs: wanted for the chunk's tokens; next_token_id then is the token after the chunk, None at the end.
    """

    start: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    read_slot: int
    write_slot: int
    first: FirstToken | None = None
    prompt_logprobs: LogprobParams | None = None
    next_token_id: int | None = None
    copy_slot: int | None = None

    @property
    def end(self) -> int:
        """Tokens in the caches after it."""
        return self.start + len(self.token_ids)


class ChunkOutput(NamedTuple):
    """What the last stage says about a chunk. prompt_tokens: positions start + 1 .. end that exist."""

    token: TokenEvent | None
    prompt_tokens: tuple[TokenEvent, ...]


class StageStep(NamedTuple):
    """Outcome of a step on this rank: an entry per chunk on the last stage, none elsewhere.

    waited_s: seconds until the frame of the stage before was here.
    """

    outputs: tuple[ChunkOutput, ...]
    forward_s: float
    waited_s: float


class ChunkStage:
    """Runs chunk steps on one rank."""

    def __init__(
        self,
        stage: Stage,
        storage: Storage,
        page_tokens: int,
        draft_context: DraftContext | None = None,
        *,
        draft_ring: DraftRing | None = None,
        relay: Relay | None = None,
    ) -> None:
        """draft_context: writes the drafter's rows on the last stage, beside the latents, or into a ring where given.

        relay: frames in and out, where this rank runs steps of another kind over the same stages.
        """
        self._draft_context, self._draft_ring = draft_context, draft_ring
        self.stage = stage
        self.storage = storage
        self.page_tokens = page_tokens
        self._caches = storage.caches()
        self._relay = relay or Relay(
            stage.groups.pipeline, stage.place, stage.in_layout, stage.dtype, stage.device
        )

    def run(
        self, step_id: int, chunks: Sequence[StageChunk], on_launched: Callable[[], None]
    ) -> StageStep:
        """Execute one plan. Pages and state slots of the chunks are overwritten.

        on_launched: called once all work on the caches is issued, before tokens are drawn.
        """
        stage, place = self.stage, self.stage.place
        batch = self.batch(chunks)
        incoming = self._relay.receive(step_id, batch.n_tokens)
        started = time.perf_counter()
        frame, taps = stage.forward(incoming, self._caches, batch)
        self._write_draft_rows(taps, batch, chunks)
        forward_s = time.perf_counter() - started
        for chunk in chunks:
            if chunk.copy_slot is not None:
                self.storage.copy_slot(chunk.write_slot, chunk.copy_slot)
        self._zero_tails(chunks)
        on_launched()
        if place.is_last:
            outputs = self._finish(frame, batch.cu_lens, chunks)
            return StageStep(outputs, forward_s, self._relay.waited_s)
        self._relay.send(step_id, frame)
        return StageStep((), forward_s, self._relay.waited_s)

    def _write_draft_rows(
        self, taps_TXD: Tensor, batch: ChunkBatch, chunks: Sequence[StageChunk]
    ) -> None:
        """One row per token at its absolute position, whatever chunk it came in."""
        pool, ring, device = self.storage.draft_pages, self._draft_ring, self.stage.device
        if self._draft_context is None:
            return
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        rows = self._draft_context(taps_TXD, positions.to(device))
        if ring is not None:
            # A chunk longer than the ring would meet itself there: only its end is kept.
            oldest = [chunk.end - ring.places * ring.page_tokens for chunk in chunks]
            lengths = torch.tensor([len(chunk.token_ids) for chunk in chunks])
            keep_T = positions >= torch.tensor(oldest).repeat_interleave(lengths)
            slot_T = torch.tensor(batch.write_slots).repeat_interleave(lengths)
            ring.write(rows, slot_T.to(device), positions.to(device), keep_T.to(device))
        elif pool is not None:
            p = self.page_tokens
            write_rows(pool, batch.slot_T // p, batch.slot_T % p, rows)

    def batch(self, chunks: Sequence[StageChunk]) -> ChunkBatch:
        """The chunks side by side, with the place of every token in the pools."""
        p, device = self.page_tokens, self.stage.device
        cu_lens, ids, slots = [0], list[int](), list[Tensor]()
        for chunk in chunks:
            cu_lens.append(cu_lens[-1] + len(chunk.token_ids))
            ids += chunk.token_ids
            positions = torch.arange(chunk.start, chunk.end)
            slots.append(torch.tensor(chunk.pages)[positions // p] * p + positions % p)
        width = max(len(chunk.pages) for chunk in chunks)
        table = [[*chunk.pages, *[0] * (width - len(chunk.pages))] for chunk in chunks]
        return ChunkBatch(
            token_ids_T=torch.tensor(ids, dtype=torch.int64, device=device),
            cu_lens=tuple(cu_lens),
            starts=tuple(chunk.start for chunk in chunks),
            page_table_RW=torch.tensor(table, dtype=torch.int32, device=device),
            slot_T=torch.cat(slots).to(device),
            read_slots=tuple(chunk.read_slot for chunk in chunks),
            write_slots=tuple(chunk.write_slot for chunk in chunks),
        )

    def _zero_tails(self, chunks: Sequence[StageChunk]) -> None:
        for chunk in chunks:
            rest = chunk.end % self.page_tokens
            if chunk.first is not None and rest:
                self.storage.zero_tail(chunk.pages[-1], rest)

    def _finish(
        self, frame: Frame, cu_lens: tuple[int, ...], chunks: Sequence[StageChunk]
    ) -> tuple[ChunkOutput, ...]:
        """Only rows that are asked for go through the head: the last of a prompt, or all for prompt logprobs.

        All ranks of the last stage take part, because the head is spread over them.
        """
        wanted = [
            range(begin, end)
            if chunk.prompt_logprobs is not None
            else range(end - (chunk.first is not None), end)
            for chunk, begin, end in zip(chunks, cu_lens, cu_lens[1:], strict=False)
        ]
        rows = [row for span in wanted for row in span]
        if not rows:
            return tuple(ChunkOutput(None, ()) for _ in chunks)
        index_N = torch.tensor(rows, dtype=torch.int64, device=self.stage.device)
        logits_NV = self.stage.logits(self.stage.hidden(frame, index_N))
        offsets = [0]
        for span in wanted:
            offsets.append(offsets[-1] + len(span))
        tokens = self._draw(logits_NV, offsets, chunks)
        return tuple(
            ChunkOutput(
                tokens.get(i), _prompt_tokens(chunk, logits_NV[offsets[i] : offsets[i + 1]])
            )
            for i, chunk in enumerate(chunks)
        )

    def _draw(
        self, logits_NV: Tensor, offsets: list[int], chunks: Sequence[StageChunk]
    ) -> dict[int, TokenEvent]:
        """First tokens by index of their chunk; drawn from the last row of the chunk."""
        final = [(i, chunk, chunk.first) for i, chunk in enumerate(chunks) if chunk.first]
        if not final:
            return {}
        last = torch.tensor([offsets[i + 1] - 1 for i, _, _ in final], device=logits_NV.device)
        events = sample(
            logits_NV.index_select(0, last),
            [first.sampling for _, _, first in final],
            [chunk.end for _, chunk, _ in final],
            [self._counts(first, logits_NV.shape[1]) for _, _, first in final],
            draws.draw(self.stage.ops.dense),
        )
        return {i: event for (i, _, _), event in zip(final, events, strict=True)}

    def _counts(self, first: FirstToken, vocab_size: int) -> TokenCounts | None:
        if not first.sampling.params.needs_counts:
            return None
        return TokenCounts(
            vocab_size,
            prompt_ids=first.prompt_ids,
            output_ids=first.output_ids,
            device=self.stage.device,
        )


def _prompt_tokens(chunk: StageChunk, logits_NV: Tensor) -> tuple[TokenEvent, ...]:
    """Row i of a chunk predicts the token at position start + i + 1; the last row of a prompt predicts none of it."""
    if chunk.prompt_logprobs is None:
        return ()
    following = list(chunk.token_ids[1:])
    if chunk.next_token_id is not None:
        following.append(chunk.next_token_id)
    top = chunk.prompt_logprobs.top
    return tuple(with_logprobs(logits_NV[: len(following)], following, top))
