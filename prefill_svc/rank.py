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
from k3.sampling import RowSampling
from k3.types import SamplingParams
from k3.v1 import plan_pb2
from prefill_svc.chunk_rows import stage_chunk, step_result
from prefill_svc.core.stage import ChunkStage, FirstToken, StageChunk, StageStep

WARM_UP_STEP = 0
DRAWS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.5),
)


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
                    result = step_result(plan, step, time.perf_counter() - received)
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

    return stage.run(plan.step_id, [stage_chunk(row) for row in plan.chunks], on_launched)


def _warm_up(context: RankContext, stage: ChunkStage) -> None:
    """One page of tokens through the whole group, on page and slot 0, which nobody holds yet; then tell the front.

    Once for each way to draw a token, as each may have a kernel to compile.
    """
    length = min(context.layout.page_tokens, context.config.schedule.token_budget)
    for done, sampling in enumerate(DRAWS):
        _report(context, done)
        first = FirstToken(RowSampling(sampling))
        stage.run(WARM_UP_STEP, [StageChunk(0, (0,) * length, (0,), -1, 0, first)], lambda: None)
        context.device.synchronize()
    context.storage.zero_tail(0, 0)
    context.storage.zero_slot(0)
    _report(context, len(DRAWS))
    pool_bytes = sum(pool.nbytes for pool in context.storage.pools.values())
    ready = plan_pb2.RankReady(pool_bytes=pool_bytes)
    context.plans.send(plan_pb2.RankMessage(ready=ready))


def _report(context: RankContext, done: int) -> None:
    progress = plan_pb2.LoadProgress(stage="warm-up", done=done, total=len(DRAWS))
    context.plans.send(plan_pb2.RankMessage(progress=progress))
