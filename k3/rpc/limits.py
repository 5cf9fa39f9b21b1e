"""What a drawn token may be asked to be: ranges of sampling, stop and log probability parameters on the wire.

Both engines check before anything reaches a rank, because a rank has no request to refuse: an id outside the vocabulary
or a number that is none would end its whole group. The ranges are the API's: the router judges by the same table.
"""

from __future__ import annotations

from collections.abc import Iterable

from k3.errors import RequestRejected
from k3.types import SAMPLING_RANGES
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
    check_ids("sampling.logit_bias", sampling.logit_bias, vocab_size)
    for name, allowed in SAMPLING_RANGES.items():
        asked = getattr(sampling, name)
        for value in asked.values() if name == "logit_bias" else (asked,):
            if not allowed.least <= value <= allowed.most:
                raise rejected(f"sampling.{name}", value, str(allowed))
