"""Whether a `Start` can be served here at all. Pure; what depends on load is the scheduler's."""

from __future__ import annotations

from k3.cache.layout import PROTO_VERSION
from k3.errors import LayoutMismatch
from k3.rpc.limits import check_drawing, check_ids, check_top, rejected
from k3.v1 import prefill_pb2


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
        raise rejected("token_ids", f"{n} tokens", f"1..{max_model_len}")
    check_ids("token_ids", start.token_ids, vocab_size)
    if start.output_prefix_len >= n:
        raise rejected("output_prefix_len", start.output_prefix_len, f"below {n} prompt tokens")
    if start.grammar:
        raise rejected("grammar", f"{len(start.grammar)} bytes", "none in this version")
    check_drawing(start.sampling, start.stop, start.logprobs, vocab_size)
    check_top("prompt_logprobs.top", start.prompt_logprobs)
