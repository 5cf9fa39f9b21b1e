"""The step loop of one prefill rank: a plan in, its chunks through this stage, the mover told, one answer out.

`k3/rank/main.py` joins the group, loads the weights and registers the pools, then calls `run`. Plans are executed
strictly in order; a gap means that front and rank disagree, and ends the rank. Only the first rank of the last stage
answers, once per plan.
"""

from __future__ import annotations

import time
from typing import assert_never

from k3.errors import GroupFailed
from k3.rank.context import RankContext
from k3.rpc import convert
from k3.sampling import RowSampling
from k3.v1 import plan_pb2
from prefill_svc.core.stage import ChunkOutput, ChunkStage, FirstToken, StageChunk, StageStep

WARM_UP_STEP = 0


def run(context: RankContext) -> None:
    """Serve plans until Shutdown. Raises EOFError when the front is gone, GroupFailed when a peer rank is."""
    stage = ChunkStage(
        context.stage, context.storage, context.layout.page_tokens, context.draft_context
    )
    place = context.stage.place
    answers = place.is_last and place.shard.index == 0
    _warm_up(context, stage)
    expected = 1
    while True:
        message = context.plans.receive()
        match message.WhichOneof("message"):
            case "plan":
                received = time.perf_counter()
                plan = message.plan
                if plan.step_id != expected:
                    raise GroupFailed(
                        f"plan {plan.step_id} came after plan {expected - 1}; plans are dense and in order"
                    )
                expected += 1
                step = _execute(context, stage, plan)
                if answers:
                    result = _result(plan, step, time.perf_counter() - received)
                    context.plans.send(plan_pb2.RankMessage(result=result))
            case "shutdown":
                return
            case "setup" | None as other:
                raise GroupFailed(f"message {other!r} is not expected once a rank is ready")
            case _ as never:
                assert_never(never)


def _execute(context: RankContext, stage: ChunkStage, plan: plan_pb2.StepPlan) -> StageStep:
    """One plan; the mover learns of it as soon as all its work is issued."""

    def on_launched() -> None:
        context.mover.step_done(plan.step_id, context.device.record())

    return stage.run(plan.step_id, [_chunk(row) for row in plan.chunks], on_launched)


def _warm_up(context: RankContext, stage: ChunkStage) -> None:
    """One page of tokens through the whole group, on page and slot 0, which nobody holds yet; then tell the front."""
    progress = plan_pb2.LoadProgress(stage="warm-up", done=0, total=1)
    context.plans.send(plan_pb2.RankMessage(progress=progress))
    length = min(context.layout.page_tokens, context.config.schedule.token_budget)
    chunk = StageChunk(start=0, token_ids=(0,) * length, pages=(0,), read_slot=-1, write_slot=0)
    stage.run(WARM_UP_STEP, [chunk], lambda: None)
    context.device.synchronize()
    context.storage.zero_tail(0, 0)
    context.storage.zero_slot(0)
    progress = plan_pb2.LoadProgress(stage="warm-up", done=1, total=1)
    context.plans.send(plan_pb2.RankMessage(progress=progress))
    pool_bytes = sum(pool.nbytes for pool in context.storage.pools.values())
    ready = plan_pb2.RankReady(pool_bytes=pool_bytes)
    context.plans.send(plan_pb2.RankMessage(ready=ready))


def _chunk(row: plan_pb2.ChunkRow) -> StageChunk:
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


def _result(plan: plan_pb2.StepPlan, step: StageStep, step_s: float) -> plan_pb2.StepResult:
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
