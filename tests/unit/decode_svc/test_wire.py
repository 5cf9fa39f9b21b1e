"""Messages of the decode service."""

import pytest

from decode_svc import wire
from decode_svc.caller import Admitted, CandidateFailed, Failed, Finished, Tokens
from decode_svc.request import DecodeRequest, Reservation
from k3.cache.slots import Slot
from k3.errors import RequestRejected, Unavailable
from k3.rpc.convert import speculation_from_proto
from k3.types import FinishReason, Speculation, StageTimes, TokenEvent, Usage
from k3.v1 import common_pb2, decode_pb2, plan_pb2

VOCAB = 50


def message(**changes: object) -> decode_pb2.GenerateRequest:
    fields: dict[str, object] = {
        "request_id": "r-0",
        "attempt": 2,
        "token_ids": [1, 2, 3, 4],
        "sampling": common_pb2.SamplingParams(
            temperature=0.5, top_p=1, repetition_penalty=1, seed=5
        ),
        "stop": common_pb2.StopParams(max_tokens=7, eos_token_ids=[9]),
        "candidates": [decode_pb2.PrefillCandidate(instance_id="p", address="a:1")],
        "salt": b"s",
        **changes,
    }
    return decode_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]


def drawn(**changes: object) -> dict[str, object]:
    fields = {"top_p": 1.0, "repetition_penalty": 1.0, **changes}
    return {"sampling": common_pb2.SamplingParams(**fields)}  # type: ignore[arg-type]


def test_a_request_is_taken_as_it_came() -> None:
    spec = wire.request_spec(message(), VOCAB)
    assert (spec.request_id, spec.attempt, spec.prompt, spec.salt) == ("r-0", 2, (1, 2, 3, 4), b"s")
    assert (spec.sampling.temperature, spec.sampling.seed) == (0.5, 5)
    assert spec.stop.eos_token_ids == (9,)
    assert [(c.instance_id, c.address) for c in spec.candidates] == [("p", "a:1")]


@pytest.mark.dspark
@pytest.mark.parametrize(
    ("changes", "most"), [({}, None), ({"draft_tokens": 0}, 0), ({"draft_tokens": 3}, 3)]
)
def test_a_request_may_ask_for_fewer_drafts(changes: dict[str, object], most: int | None) -> None:
    assert wire.request_spec(message(**changes), VOCAB).draft_tokens == most


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"grammar": b"x"}, "grammar"),
        ({"prompt_logprobs": common_pb2.LogprobParams(enabled=True)}, "prompt_logprobs"),
        ({"token_ids": [1, VOCAB]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"output_prefix_len": 4}, "output_prefix_len"),
        (drawn(logit_bias={VOCAB: 1.0}), "sampling.logit_bias"),
        (drawn(frequency_penalty=float("inf")), "sampling.frequency_penalty"),
        (
            {"stop": common_pb2.StopParams(max_tokens=7, eos_token_ids=[VOCAB])},
            "stop.eos_token_ids",
        ),
    ],
)
def test_what_is_not_served_is_rejected_by_name(changes: dict[str, object], param: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        wire.request_spec(message(**changes), VOCAB)
    assert caught.value.param == param


def opened(**changes: object) -> plan_pb2.OpenRow:
    request = DecodeRequest(3, wire.request_spec(message(**changes), VOCAB), 0.0, draft_tokens=3)
    request.reservation = Reservation((5, 6), 2, Slot(1, 4))
    request.outputs = [TokenEvent(8), TokenEvent(9)]
    request.base = 5
    return wire.open_row(request)


@pytest.mark.dspark
def test_an_opened_row_carries_the_anchor_and_its_memory() -> None:
    row = opened()
    assert (row.row, row.epoch, row.base, row.anchor, row.state_slot) == (1, 4, 5, 9, 2)
    assert (list(row.pages), list(row.output_ids), row.draft_len) == ([5, 6], [8, 9], 3)
    assert list(row.prompt_ids) == []


@pytest.mark.dspark
def test_penalties_get_the_tokens_they_count_and_drafts_as_others_do() -> None:
    penalised = common_pb2.SamplingParams(temperature=0, top_p=1, repetition_penalty=1.2)
    row = opened(sampling=penalised, output_prefix_len=1)
    assert list(row.prompt_ids) == [1, 2, 3]
    assert list(row.output_ids) == [4, 8, 9]
    assert row.draft_len == 3


@pytest.mark.dspark
def test_events_become_responses_and_faults_errors() -> None:
    error = Unavailable("gone")
    assert wire.response(Failed(error)) is error
    admitted = wire.response(Admitted(0.5))
    failed = wire.response(CandidateFailed("p", "unavailable", "text"))
    drafts = Speculation((1, 0, 1), 4)
    tokens = wire.response(Tokens((TokenEvent(4, -0.5, ((4, -0.5),)),), 3, drafts))
    finished = wire.response(
        Finished(FinishReason.STOP, None, Usage(4, 2, 0), StageTimes(1.0, 2.0, 3.0, 4.0), "p")
    )
    for answer in (admitted, failed, tokens, finished):
        assert isinstance(answer, decode_pb2.GenerateResponse)
    assert [a.WhichOneof("event") for a in (admitted, failed, tokens, finished)] == [  # type: ignore[union-attr]
        "admitted",
        "candidate_failed",
        "tokens",
        "finished",
    ]
    assert not finished.finished.HasField("stop_token_id")  # type: ignore[union-attr]
    assert tokens.tokens.tokens[0].top[0].token_id == 4  # type: ignore[union-attr]
    assert tokens.tokens.cached_tokens == 3  # type: ignore[union-attr]
    assert speculation_from_proto(tokens.tokens) == drafts  # type: ignore[union-attr]
