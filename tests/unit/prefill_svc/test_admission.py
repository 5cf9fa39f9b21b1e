"""What a Start must be to be served at all."""

from __future__ import annotations

import pytest

from k3.errors import LayoutMismatch, RequestRejected
from k3.v1 import common_pb2, prefill_pb2
from prefill_svc.admission import check_start


def start(**fields: object) -> prefill_pb2.Start:
    values = {
        "proto_version": 1,
        "token_ids": [1, 2, 3],
        "sampling": common_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0),
        "layout_fingerprint": "f",
        **fields,
    }
    return prefill_pb2.Start(**values)  # type: ignore[arg-type]


def check(opening: prefill_pb2.Start) -> None:
    check_start(opening, layout_fingerprint="f", vocab_size=100, max_model_len=5)


def sampling(**fields: object) -> dict[str, object]:
    values = {"top_p": 1.0, "repetition_penalty": 1.0, **fields}
    return {"sampling": common_pb2.SamplingParams(**values)}  # type: ignore[arg-type]


def test_a_plain_request_passes() -> None:
    check(start())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1] * 6}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [100]}, "token_ids"),
        ({"output_prefix_len": 3}, "output_prefix_len"),
        ({"grammar": b"g"}, "grammar"),
        ({"logprobs": common_pb2.LogprobParams(enabled=True, top=21)}, "logprobs.top"),
        (
            {"prompt_logprobs": common_pb2.LogprobParams(enabled=True, top=-1)},
            "prompt_logprobs.top",
        ),
        (sampling(temperature=-0.1), "sampling.temperature"),
        (sampling(temperature=float("nan")), "sampling.temperature"),
        (sampling(temperature=2.1), "sampling.temperature"),
        (sampling(top_p=0.0), "sampling.top_p"),
        (sampling(top_p=1e-320), "sampling.top_p"),
        (sampling(min_p=1.5), "sampling.min_p"),
        (sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
        (sampling(repetition_penalty=1e-40), "sampling.repetition_penalty"),
        (sampling(repetition_penalty=1e39), "sampling.repetition_penalty"),
        (sampling(repetition_penalty=float("inf")), "sampling.repetition_penalty"),
        (sampling(presence_penalty=float("nan")), "sampling.presence_penalty"),
        (sampling(frequency_penalty=float("-inf")), "sampling.frequency_penalty"),
        (sampling(logit_bias={100: 1.0}), "sampling.logit_bias"),
        (sampling(logit_bias={99: float("nan")}), "sampling.logit_bias"),
        ({"stop": common_pb2.StopParams(eos_token_ids=[100])}, "stop.eos_token_ids"),
        ({"stop": common_pb2.StopParams(stop_token_ids=[-1])}, "stop.stop_token_ids"),
    ],
)
def test_a_faulty_field_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        check(start(**fields))
    assert caught.value.param == param


def test_a_number_out_of_its_range_is_told_the_range() -> None:
    with pytest.raises(RequestRejected, match=r"penalty: 1e-40, expected 1e-20\.\.2$"):
        check(start(**sampling(repetition_penalty=1e-40)))
    check(start(**sampling(repetition_penalty=1e-20, top_p=1e-20, temperature=2.0)))


@pytest.mark.parametrize("fields", [{"proto_version": 2}, {"layout_fingerprint": "g"}])
def test_another_protocol_or_layout_is_a_mismatch(fields: dict[str, object]) -> None:
    with pytest.raises(LayoutMismatch):
        check(start(**fields))
