"""What goes onto the wire comes back equal; generated types do not leak their live containers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.errors import RequestRejected
from k3.rpc import convert
from k3.types import (
    FinishReason,
    LogprobParams,
    SamplingParams,
    StageTimes,
    StopParams,
    TokenEvent,
    Usage,
)
from k3.v1 import common_pb2, decode_pb2

ids = st.integers(0, 2**31 - 1)
counts = st.integers(0, 2**31 - 1)
float32 = st.floats(width=32, allow_nan=False)
numbers = st.floats(-1e6, 1e6)
sampling = st.builds(
    SamplingParams,
    temperature=numbers,
    top_p=numbers,
    top_k=counts,
    min_p=numbers,
    presence_penalty=numbers,
    frequency_penalty=numbers,
    repetition_penalty=numbers,
    logit_bias=st.dictionaries(ids, float32, max_size=5),
    seed=st.integers(-(2**63), 2**63 - 1),
    sample_index=counts,
    min_tokens=counts,
)
stops = st.builds(
    StopParams,
    max_tokens=counts,
    eos_token_ids=st.lists(ids, max_size=4).map(tuple),
    stop_token_ids=st.lists(ids, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
)
tokens = st.builds(
    TokenEvent,
    ids,
    st.none() | float32,
    st.lists(st.tuples(ids, float32), max_size=20).map(tuple),
)


def over_the_wire(message, kind):
    return kind.FromString(message.SerializeToString())


@given(sampling)
def test_sampling_parameters_survive(params):
    message = over_the_wire(convert.sampling_to_proto(params), common_pb2.SamplingParams)
    back = convert.sampling_from_proto(message)
    assert back == params
    message.logit_bias[5] = 1.0
    assert back == params


def test_default_sampling_parameters_are_not_the_wires_zeros():
    default = SamplingParams()
    assert convert.sampling_from_proto(convert.sampling_to_proto(default)) == default
    assert convert.sampling_from_proto(common_pb2.SamplingParams()).is_greedy


@given(stops)
def test_stop_parameters_survive(params):
    message = over_the_wire(convert.stop_to_proto(params), common_pb2.StopParams)
    assert convert.stop_from_proto(message) == params


@given(st.builds(LogprobParams, enabled=st.booleans(), top=st.integers(0, 20)))
def test_logprob_parameters_survive(params):
    message = over_the_wire(convert.logprobs_to_proto(params), common_pb2.LogprobParams)
    assert convert.logprobs_from_proto(message) == params


@given(tokens)
def test_tokens_survive_and_an_absent_logprob_stays_absent(token):
    message = over_the_wire(convert.token_to_proto(token), common_pb2.Token)
    assert convert.token_from_proto(message) == token


@pytest.mark.parametrize("logprob", [None, 0.0, -0.0, float("-inf")])
def test_a_logprob_of_zero_is_not_an_absent_one(logprob):
    message = over_the_wire(convert.token_to_proto(TokenEvent(1, logprob)), common_pb2.Token)
    assert convert.token_from_proto(message).logprob == logprob


@pytest.mark.parametrize("reason", FinishReason)
def test_finish_reasons_survive(reason):
    assert convert.finish_from_proto(convert.finish_to_proto(reason)) is reason


@pytest.mark.parametrize("number", [0, 99])
def test_an_unknown_finish_reason_is_refused(number):
    finished = over_the_wire(decode_pb2.Finished(reason=number), decode_pb2.Finished)
    with pytest.raises(RequestRejected, match=f"finish reason {number}"):
        convert.finish_from_proto(finished.reason)


@given(st.builds(Usage, counts, counts, counts))
def test_usage_survives(usage):
    message = over_the_wire(convert.usage_to_proto(usage), common_pb2.Usage)
    assert convert.usage_from_proto(message) == usage


@given(st.builds(StageTimes, numbers, numbers, numbers, numbers))
def test_stage_times_survive(times):
    message = over_the_wire(convert.times_to_proto(times), decode_pb2.StageTimes)
    assert convert.times_from_proto(message) == times
