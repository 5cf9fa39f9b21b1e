"""Chunks of a `StepPlan` as a stage runs them, and what it says about them; the rank's end of `wire.py`."""

from __future__ import annotations

from k3.rpc import convert
from k3.sampling import RowSampling
from k3.v1 import plan_pb2
from prefill_svc.core.stage import ChunkOutput, FirstToken, StageChunk, StageStep


def stage_chunk(row: plan_pb2.ChunkRow) -> StageChunk:
    """A chunk as the stage runs it."""
    wanted = row.HasField("prompt_logprobs")
    return StageChunk(
        start=row.start,
        token_ids=tuple(row.token_ids),
        pages=tuple(row.pages),
        read_slot=row.read_slot,
        write_slot=row.write_slot,
        first=_first_token(row) if row.is_final else None,
        prompt_logprobs=convert.logprobs_from_proto(row.prompt_logprobs) if wanted else None,
        next_token_id=row.next_token_id if row.HasField("next_token_id") else None,
        copy_slot=row.copy_slot if row.HasField("copy_slot") else None,
    )


def _first_token(row: plan_pb2.ChunkRow) -> FirstToken:
    """Tokens at the end of the prompt that are generated output count as such for penalties and min_tokens."""
    output_start = row.start + len(row.token_ids) - row.output_prefix_len
    sampling = RowSampling(
        params=convert.sampling_from_proto(row.sampling),
        end_ids=convert.stop_from_proto(row.stop).end_ids,
        logprobs=convert.logprobs_from_proto(row.logprobs),
        output_start=output_start,
    )
    return FirstToken(
        sampling=sampling,
        prompt_ids=tuple(row.prompt_ids[:output_start]),
        output_ids=tuple(row.prompt_ids[output_start:]),
    )


def step_result(plan: plan_pb2.StepPlan, step: StageStep, step_s: float) -> plan_pb2.StepResult:
    """The acknowledgement of a plan of chunks, by the rank that answers."""
    result = plan_pb2.StepResult(
        step_id=plan.step_id, step_s=step_s, forward_s=step.forward_s, waited_s=step.waited_s
    )
    for row, output in zip(plan.chunks, step.outputs, strict=True):
        if row.is_final or row.HasField("prompt_logprobs"):
            result.rows.append(_row(row, output))
    return result


def _row(row: plan_pb2.ChunkRow, output: ChunkOutput) -> plan_pb2.RowResult:
    return plan_pb2.RowResult(
        request=row.request,
        epoch=row.epoch,
        tokens=[convert.token_to_proto(output.token)] if output.token is not None else [],
        prompt_tokens=[convert.token_to_proto(token) for token in output.prompt_tokens],
    )
