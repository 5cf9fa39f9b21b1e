"""Which of the tokens a step emitted are kept, and whether they end the generation.

A verify group may emit several tokens: everything after the first end is dropped, the bonus token too. The end token
itself is kept and counted. Stop strings are the router's matter; a ban on end ids before `min_tokens` is the
sampler's. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from k3.types import FinishReason, StopParams, TokenEvent, Usage


class Kept(NamedTuple):
    """Tokens that count, and why the generation ends with the last of them (None: it goes on).

    stop_token_id: the stop id that matched; None for an end-of-sequence token and for the length limit.
    """

    tokens: tuple[TokenEvent, ...]
    finish: FinishReason | None = None
    stop_token_id: int | None = None


def keep(stop: StopParams, n_before: int, tokens: Sequence[TokenEvent]) -> Kept:
    """Apply the stop conditions to `tokens`, which follow `n_before` output tokens.

    An end id that is also the last token allowed ends with "stop". Ids in both lists count as stop ids.
    """
    room = stop.max_tokens - n_before
    for i, token in enumerate(tokens[:room]):
        if token.id in stop.stop_token_ids:
            return Kept(tuple(tokens[: i + 1]), FinishReason.STOP, token.id)
        if not stop.ignore_eos and token.id in stop.eos_token_ids:
            return Kept(tuple(tokens[: i + 1]), FinishReason.STOP)
    if len(tokens) >= room:
        return Kept(tuple(tokens[:room]), FinishReason.LENGTH)
    return Kept(tuple(tokens))


def usage(prompt_len: int, output_prefix_len: int, n_output: int, cached_tokens: int) -> Usage:
    """Token counts of a generation; tokens of an earlier attempt inside the prompt are output, cached or not."""
    n_prompt = prompt_len - output_prefix_len
    return Usage(n_prompt, n_output + output_prefix_len, min(cached_tokens, n_prompt))
