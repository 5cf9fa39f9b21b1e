"""What a drawn token may be asked to be: ranges of sampling, stop and log probability parameters on the wire.

Both engines check before anything reaches a rank, because a rank has no request to refuse: an id outside the vocabulary
or a number that is none would end its whole group. The router judges the API's own, narrower ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from k3.errors import RequestRejected
from k3.v1 import common_pb2

MAX_TOP_LOGPROBS = 20


def check_drawing(
    sampling: common_pb2.SamplingParams,
    stop: common_pb2.StopParams,
    logprobs: common_pb2.LogprobParams,
    vocab_size: int,
) -> None:
    """Raises RequestRejected naming the field."""
    _check_sampling(sampling, vocab_size)
    check_ids("stop.eos_token_ids", stop.eos_token_ids, vocab_size)
    check_ids("stop.stop_token_ids", stop.stop_token_ids, vocab_size)
    check_top("logprobs.top", logprobs)


def check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises RequestRejected for the first id outside the vocabulary."""
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise rejected(param, f"id {wrong}", f"0..{vocab_size - 1}")


def check_top(param: str, wanted: common_pb2.LogprobParams) -> None:
    """Raises RequestRejected for a number of alternatives nobody may ask for."""
    if not 0 <= wanted.top <= MAX_TOP_LOGPROBS:
        raise rejected(param, wanted.top, f"0..{MAX_TOP_LOGPROBS}")


def rejected(param: str, got: object, expected: str) -> RequestRejected:
    """The error for a field."""
    return RequestRejected(f"{param}: {got}, expected {expected}", param=param)


def _check_sampling(sampling: common_pb2.SamplingParams, vocab_size: int) -> None:
    """Comparisons with NaN are false, so every test states what is right."""
    if not 0 <= sampling.temperature < math.inf:
        raise rejected("sampling.temperature", sampling.temperature, "0..2")
    if not 0 < sampling.top_p <= 1:
        raise rejected("sampling.top_p", sampling.top_p, "in (0, 1]")
    if not 0 <= sampling.min_p <= 1:
        raise rejected("sampling.min_p", sampling.min_p, "in [0, 1]")
    if not 0 < sampling.repetition_penalty < math.inf:
        raise rejected("sampling.repetition_penalty", sampling.repetition_penalty, "in (0, 2]")
    for name, penalty in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
    ):
        if not math.isfinite(penalty):
            raise rejected(f"sampling.{name}", penalty, "-2..2")
    check_ids("sampling.logit_bias", sampling.logit_bias, vocab_size)
    for token_id, bias in sampling.logit_bias.items():
        if not math.isfinite(bias):
            raise rejected("sampling.logit_bias", f"{bias} for id {token_id}", "-100..100")
