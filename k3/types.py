"""Values that cross service boundaries inside a process: frozen, hashable where possible, no torch, no protobuf.

`k3/rpc/convert.py` turns them into the messages of `proto/k3/v1/common.proto` and back; field meanings, units and
ranges are documented there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
TokenId = NewType("TokenId", int)

NO_BIAS: Mapping[int, float] = MappingProxyType({})


class Range(NamedTuple):
    """What a number may be, both ends included: neither NaN nor an infinity lies in one."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least:g}..{self.most:g}"


# Of what must not be 0: quotients by it stay finite in float32, and no machine takes it for 0.
SMALLEST = 1e-20
SAMPLING_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "temperature": Range(0, 2),
        "top_p": Range(SMALLEST, 1),
        "min_p": Range(0, 1),
        "presence_penalty": Range(-2, 2),
        "frequency_penalty": Range(-2, 2),
        "repetition_penalty": Range(SMALLEST, 2),
        "logit_bias": Range(-100, 100),
    }
)


class FinishReason(Enum):
    """Why a generation ended; the values are what OpenAI clients see."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Defaults are neutral except temperature (1.0)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: NO_BIAS)
    seed: int = 0
    sample_index: int = 0
    min_tokens: int = 0

    @property
    def is_greedy(self) -> bool:
        """Temperatures below 1e-5 mean argmax; top_p, top_k and min_p are ignored then."""
        return self.temperature < 1e-5

    @property
    def needs_counts(self) -> bool:
        """Whether drawing depends on how often tokens were generated."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether drawing depends on the prompt's tokens."""
        return self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a generation ends. Stop strings are the router's matter."""

    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that may not be drawn while min_tokens is not reached."""
        return (
            self.stop_token_ids if self.ignore_eos else (*self.eos_token_ids, *self.stop_token_ids)
        )


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """Which log probabilities are wanted; `top` alternatives, 0..20."""

    enabled: bool = False
    top: int = 0


class TokenEvent(NamedTuple):
    """One generated token. `logprob` is None unless asked for; `top` is (id, logprob), descending."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Usage(NamedTuple):
    """Token counts of one generation."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Speculation(NamedTuple):
    """Drafts of one generation. histogram[j]: steps that accepted exactly j drafts, j = 0..k."""

    histogram: tuple[int, ...]
    n_drafts: int

    @property
    def n_steps(self) -> int:
        """Steps that checked drafts."""
        return sum(self.histogram)

    @property
    def n_accepted(self) -> int:
        """Drafts accepted."""
        return sum(j * n for j, n in enumerate(self.histogram))


class StageTimes(NamedTuple):
    """Where the time of one generation went, seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
