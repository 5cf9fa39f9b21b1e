"""Whether a `Start` can be served here at all. Pure; what depends on load is the scheduler's."""

from __future__ import annotations

from k3.cache.layout import PROTO_VERSION
from k3.errors import LayoutMismatch, RequestRejected
from k3.v1 import common_pb2, prefill_pb2

MAX_TOP_LOGPROBS = 20


def check_start(
    start: prefill_pb2.Start, *, layout_fingerprint: str, vocab_size: int, max_model_len: int
) -> None:
    """Raises LayoutMismatch for another protocol or layout, RequestRejected naming the field otherwise."""
    if start.proto_version != PROTO_VERSION:
        raise LayoutMismatch(
            f"proto_version: {PROTO_VERSION} != {start.proto_version}; run the same release on both"
        )
    if start.layout_fingerprint != layout_fingerprint:
        raise LayoutMismatch(
            f"layout_fingerprint: {layout_fingerprint} != {start.layout_fingerprint}; call Connect to "
            "learn which field differs"
        )
    n = len(start.token_ids)
    if not 1 <= n <= max_model_len:
        raise _rejected("token_ids", f"{n} tokens", f"1..{max_model_len}")
    if min(start.token_ids) < 0 or max(start.token_ids) >= vocab_size:
        outside = [i for i in start.token_ids if not 0 <= i < vocab_size]
        raise _rejected("token_ids", f"id {outside[0]}", f"0..{vocab_size - 1}")
    if start.output_prefix_len >= n:
        raise _rejected("output_prefix_len", start.output_prefix_len, f"below {n} prompt tokens")
    if start.grammar:
        raise _rejected("grammar", f"{len(start.grammar)} bytes", "none in this version")
    _check_sampling(start.sampling, vocab_size)
    for name, wanted in (("logprobs", start.logprobs), ("prompt_logprobs", start.prompt_logprobs)):
        if not 0 <= wanted.top <= MAX_TOP_LOGPROBS:
            raise _rejected(f"{name}.top", wanted.top, f"0..{MAX_TOP_LOGPROBS}")


def _check_sampling(sampling: common_pb2.SamplingParams, vocab_size: int) -> None:
    """Only what would make the draw meaningless; the router judges the API's ranges."""
    if not 0 <= sampling.temperature < float("inf"):
        raise _rejected("sampling.temperature", sampling.temperature, "0..2")
    if not 0 < sampling.top_p <= 1:
        raise _rejected("sampling.top_p", sampling.top_p, "in (0, 1]")
    if not 0 <= sampling.min_p <= 1:
        raise _rejected("sampling.min_p", sampling.min_p, "in [0, 1]")
    if not sampling.repetition_penalty > 0:
        raise _rejected("sampling.repetition_penalty", sampling.repetition_penalty, "in (0, 2]")
    outside = [i for i in sampling.logit_bias if not 0 <= i < vocab_size]
    if outside:
        raise _rejected("sampling.logit_bias", f"id {outside[0]}", f"0..{vocab_size - 1}")


def _rejected(param: str, got: object, expected: str) -> RequestRejected:
    return RequestRejected(f"{param}: {got}, expected {expected}", param=param)
