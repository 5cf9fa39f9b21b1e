"""Plans, results and requests of the decode service to and from their messages. Generated types stop here."""

from __future__ import annotations

from typing import assert_never

from decode_svc.caller import Admitted, CandidateFailed, Event, Failed, Finished, Tokens
from decode_svc.plan import Emitted, Plan, RowState
from decode_svc.request import Candidate, DecodeRequest, RequestSpec
from k3.cache.layout import PROTO_VERSION
from k3.errors import K3Error, RequestRejected
from k3.rpc import convert
from k3.rpc.limits import check_drawing
from k3.types import RequestId
from k3.v1 import decode_pb2, plan_pb2, prefill_pb2


def step_plan(plan: Plan) -> plan_pb2.StepPlan:
    """A plan for the ranks."""
    message = plan_pb2.StepPlan(
        step_id=plan.step_id, group_len=plan.group_len, no_drafts=plan.no_drafts
    )
    for row in plan.closed:
        message.close_rows.add(row=row.index, epoch=row.epoch)
    for request in plan.opened:
        message.open_rows.append(open_row(request))
    for step in plan.rows:
        row = message.verify_rows.add(
            row=step.row.index,
            epoch=step.row.epoch,
            base_bound=step.base_bound,
            draft_len=step.draft_len,
            opens=step.opens,
        )
        if step.state is not None:
            row.state.CopyFrom(row_state(step.state))
    return message


def row_state(state: RowState) -> plan_pb2.RowState:
    """A row for stages that did not judge it."""
    return plan_pb2.RowState(
        base=state.base,
        anchor=state.anchor,
        read_column=state.read_column,
        draft_ids=state.drafts,
    )


def open_row(request: DecodeRequest) -> plan_pb2.OpenRow:
    """The row of a request whose caches are complete."""
    spec, held, draft_tokens = request.spec, request.held, request.drafts.width
    output = [token.id for token in request.outputs]
    start = request.prompt_len - spec.output_prefix_len
    fresh, earlier = spec.prompt[:start], spec.prompt[start:]
    return plan_pb2.OpenRow(
        row=held.row.index,
        request=request.key,
        epoch=held.row.epoch,
        base=request.base,
        anchor=output[-1],
        pages=held.pages,
        state_slot=held.state_slot,
        draft_slot=held.draft_slot if draft_tokens else None,
        draft_valid=request.draft_valid,
        sampling=convert.sampling_to_proto(spec.sampling),
        stop=convert.stop_to_proto(spec.stop),
        logprobs=convert.logprobs_to_proto(spec.logprobs),
        draft_len=draft_tokens,
        prompt_ids=fresh if spec.sampling.needs_prompt_ids else (),
        output_ids=[*earlier, *output],
    )


def prefill_start(
    spec: RequestSpec,
    *,
    instance_id: str = "",
    layout_fingerprint: str = "",
    draft_fingerprint: str = "",
) -> prefill_pb2.Start:
    """How a prompt is asked for. The rest says who asks; nobody compares it where the prompt is computed in place."""
    return prefill_pb2.Start(
        proto_version=PROTO_VERSION,
        instance_id=instance_id,
        request_id=spec.request_id,
        attempt=spec.attempt,
        token_ids=spec.prompt,
        salt=spec.salt,
        sampling=convert.sampling_to_proto(spec.sampling),
        stop=convert.stop_to_proto(spec.stop),
        output_prefix_len=spec.output_prefix_len,
        logprobs=convert.logprobs_to_proto(spec.logprobs),
        layout_fingerprint=layout_fingerprint,
        draft_fingerprint=draft_fingerprint,
    )


def emitted(result: plan_pb2.StepResult) -> list[Emitted]:
    """What a step says about its rows."""
    return [
        Emitted(
            row.row,
            row.epoch,
            tuple(convert.token_from_proto(token) for token in row.tokens),
            row.n_drafts,
            tuple(row.confidence),
            tuple(row.next_drafts),
        )
        for row in result.rows
    ]


def request_spec(message: decode_pb2.GenerateRequest, vocab_size: int) -> RequestSpec:
    """A request as the router sent it. Raises RequestRejected for what is not served here."""
    if message.grammar:
        raise RequestRejected(
            "grammars are not available in this version; leave `grammar` empty",
            code="unsupported_parameter",
            param="grammar",
        )
    if message.HasField("prompt_logprobs") and message.prompt_logprobs.enabled:
        raise RequestRejected(
            "log probabilities of the prompt are not available in this version; leave `prompt_logprobs` out",
            code="unsupported_parameter",
            param="prompt_logprobs",
        )
    prompt = tuple(message.token_ids)
    if prompt and not (min(prompt) >= 0 and max(prompt) < vocab_size):
        raise RequestRejected(
            f"token ids {min(prompt)}..{max(prompt)}: must lie in 0..{vocab_size - 1}",
            param="token_ids",
        )
    if message.output_prefix_len >= max(1, len(prompt)):
        raise RequestRejected(
            f"output_prefix_len={message.output_prefix_len}: must be less than the {len(prompt)} token ids",
            param="output_prefix_len",
        )
    check_drawing(message.sampling, message.stop, message.logprobs, vocab_size)
    return RequestSpec(
        request_id=RequestId(message.request_id),
        prompt=prompt,
        sampling=convert.sampling_from_proto(message.sampling),
        stop=convert.stop_from_proto(message.stop),
        logprobs=convert.logprobs_from_proto(message.logprobs),
        candidates=tuple(Candidate(c.instance_id, c.address) for c in message.candidates),
        salt=message.salt,
        attempt=message.attempt,
        output_prefix_len=message.output_prefix_len,
        draft_tokens=message.draft_tokens if message.HasField("draft_tokens") else None,
    )


def response(event: Event) -> decode_pb2.GenerateResponse | K3Error:
    """One event for the caller, or the error the call ends with."""
    match event:
        case Admitted(queue_s):
            return decode_pb2.GenerateResponse(admitted=decode_pb2.Admitted(queue_s=queue_s))
        case CandidateFailed(instance_id, reason, message):
            failed = decode_pb2.CandidateFailed(
                instance_id=instance_id, reason=reason, message=message
            )
            return decode_pb2.GenerateResponse(candidate_failed=failed)
        case Tokens(tokens, cached_tokens, speculation):
            message = decode_pb2.Tokens(
                tokens=[convert.token_to_proto(token) for token in tokens],
                cached_tokens=cached_tokens,
                speculation=convert.speculation_to_proto(speculation),
            )
            return decode_pb2.GenerateResponse(tokens=message)
        case Finished():
            finished = decode_pb2.Finished(
                reason=convert.finish_to_proto(event.reason),
                stop_token_id=event.stop_token_id,
                usage=convert.usage_to_proto(event.usage),
                times=convert.times_to_proto(event.times),
                prefill_instance_id=event.prefill_instance_id,
                speculation=convert.speculation_to_proto(event.speculation),
            )
            return decode_pb2.GenerateResponse(finished=finished)
        case Failed(error):
            return error
        case _:
            assert_never(event)
