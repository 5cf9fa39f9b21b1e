"""Scheduler plans to `StepPlan` messages, and results back: where the scheduler's numbers meet the prompt's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3.rpc import convert
from k3.v1 import common_pb2, plan_pb2, prefill_pb2
from prefill_svc.core.checkpoints import NO_SLOT
from prefill_svc.core.scheduler import Chunk, Plan


def step_plan(plan: Plan, starts: Mapping[int, prefill_pb2.Start]) -> plan_pb2.StepPlan:
    """The message of a plan. starts: the opening message of every planned prompt, by key."""
    return plan_pb2.StepPlan(
        step_id=plan.step_id, chunks=[_row(chunk, starts[chunk.key]) for chunk in plan.chunks]
    )


def wants_prompt_logprobs(start: prefill_pb2.Start) -> bool:
    """Whether every token of the prompt must be computed, for its log probability."""
    return start.HasField("prompt_logprobs") and start.prompt_logprobs.enabled


def prompt_logprobs(
    chunk: Chunk, start: prefill_pb2.Start, tokens: Sequence[common_pb2.Token]
) -> prefill_pb2.PromptLogprobs:
    """Log probabilities of a chunk's stretch; the first token of a prompt has none but an entry."""
    if chunk.start:
        return prefill_pb2.PromptLogprobs(start=chunk.start + 1, tokens=tokens)
    first = common_pb2.Token(id=start.token_ids[0])
    return prefill_pb2.PromptLogprobs(start=0, tokens=[first, *tokens])


def _row(chunk: Chunk, start: prefill_pb2.Start) -> plan_pb2.ChunkRow:
    row = plan_pb2.ChunkRow(
        request=chunk.key,
        epoch=chunk.epoch,
        start=chunk.start,
        token_ids=start.token_ids[chunk.start : chunk.end],
        is_final=chunk.is_final,
        pages=chunk.pages,
        read_slot=chunk.read_slot,
        write_slot=chunk.write_slot,
    )
    if chunk.copy_slot != NO_SLOT:
        row.copy_slot = chunk.copy_slot
    if wants_prompt_logprobs(start):
        row.prompt_logprobs.CopyFrom(start.prompt_logprobs)
        if not chunk.is_final:
            row.next_token_id = start.token_ids[chunk.end]
    if chunk.is_final:
        row.sampling.CopyFrom(start.sampling)
        row.stop.CopyFrom(start.stop)
        row.logprobs.CopyFrom(start.logprobs)
        row.output_prefix_len = start.output_prefix_len
        if convert.sampling_from_proto(start.sampling).needs_counts:
            row.prompt_ids.extend(start.token_ids)
    return row
