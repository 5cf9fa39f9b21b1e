"""Messages of `proto/k3/v1/common.proto` to and from the dataclasses of `k3/types.py`. Generated types stop here.

Pure, one pair of functions per type. Values are carried as they are: their ranges are the router's to check, except
where a dataclass cannot hold what the wire allows (then RequestRejected names the field).
"""

from __future__ import annotations

from types import MappingProxyType

from k3.errors import RequestRejected
from k3.types import (
    NO_BIAS,
    FinishReason,
    LogprobParams,
    SamplingParams,
    Speculation,
    StageTimes,
    StopParams,
    TokenEvent,
    Usage,
)
from k3.v1 import common_pb2, decode_pb2

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """SamplingParams for the wire."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        sample_index=params.sample_index,
        min_tokens=params.min_tokens,
    )


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """SamplingParams from the wire; biases come back as float32 values in float64."""
    bias = message.logit_bias
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=MappingProxyType(dict(bias)) if bias else NO_BIAS,
        seed=message.seed,
        sample_index=message.sample_index,
        min_tokens=message.min_tokens,
    )


def stop_to_proto(params: StopParams) -> common_pb2.StopParams:
    """StopParams for the wire."""
    return common_pb2.StopParams(
        max_tokens=params.max_tokens,
        eos_token_ids=params.eos_token_ids,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def stop_from_proto(message: common_pb2.StopParams) -> StopParams:
    """StopParams from the wire."""
    return StopParams(
        max_tokens=message.max_tokens,
        eos_token_ids=tuple(message.eos_token_ids),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def logprobs_to_proto(params: LogprobParams) -> common_pb2.LogprobParams:
    """LogprobParams for the wire."""
    return common_pb2.LogprobParams(enabled=params.enabled, top=params.top)


def logprobs_from_proto(message: common_pb2.LogprobParams) -> LogprobParams:
    """LogprobParams from the wire."""
    return LogprobParams(enabled=message.enabled, top=message.top)


def token_to_proto(token: TokenEvent) -> common_pb2.Token:
    """One token for the wire."""
    message = common_pb2.Token(id=token.id, logprob=token.logprob)
    for token_id, logprob in token.top:
        message.top.add(token_id=token_id, logprob=logprob)
    return message


def token_from_proto(message: common_pb2.Token) -> TokenEvent:
    """One token from the wire."""
    return TokenEvent(
        message.id,
        message.logprob if message.HasField("logprob") else None,
        tuple((entry.token_id, entry.logprob) for entry in message.top),
    )


def finish_to_proto(reason: FinishReason) -> common_pb2.FinishReason:
    """FinishReason for the wire."""
    return _REASONS[reason]


def finish_from_proto(value: common_pb2.FinishReason) -> FinishReason:
    """FinishReason from the wire. Raises RequestRejected for a value this version does not know."""
    for reason, number in _REASONS.items():
        if number == value:
            return reason
    raise RequestRejected(
        f"finish reason {value}: expected one of {sorted(_REASONS.values())}; run the same version everywhere",
        param="finished.reason",
    )


def usage_to_proto(usage: Usage) -> common_pb2.Usage:
    """Usage for the wire."""
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def usage_from_proto(message: common_pb2.Usage) -> Usage:
    """Usage from the wire."""
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def speculation_to_proto(speculation: Speculation | None) -> decode_pb2.Speculation | None:
    """Speculation for the wire."""
    if speculation is None:
        return None
    return decode_pb2.Speculation(histogram=speculation.histogram, n_drafts=speculation.n_drafts)


def speculation_from_proto(
    message: decode_pb2.Finished | decode_pb2.Tokens,
) -> Speculation | None:
    """Speculation of a generation at its end or so far, None when there was none."""
    if not message.HasField("speculation"):
        return None
    return Speculation(tuple(message.speculation.histogram), message.speculation.n_drafts)


def times_to_proto(times: StageTimes) -> decode_pb2.StageTimes:
    """StageTimes for the wire."""
    return decode_pb2.StageTimes(
        queue_s=times.queue_s,
        prefill_s=times.prefill_s,
        transfer_s=times.transfer_s,
        decode_s=times.decode_s,
    )


def times_from_proto(message: decode_pb2.StageTimes) -> StageTimes:
    """StageTimes from the wire."""
    return StageTimes(message.queue_s, message.prefill_s, message.transfer_s, message.decode_s)
