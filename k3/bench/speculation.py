"""Acceptance of drafts, added up over requests, from the `metrics.speculative_decoding` of their answers.

A verify step with j accepted drafts emits j + 1 tokens: the mean over steps is the acceptance length. Position k
(1-based) is accepted when at least k drafts of the step are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Acceptance:
    """histogram[j] = verify steps that accepted exactly j drafts, j = 0..K."""

    histogram: tuple[int, ...]

    @staticmethod
    def none(n_drafts: int) -> Acceptance:
        """No step yet, of `n_drafts` = K drafts each."""
        return Acceptance((0,) * (n_drafts + 1))

    @staticmethod
    def of_body(body: Mapping[str, Any]) -> Acceptance | None:
        """What an answer reports; None when it reports nothing."""
        metrics: Mapping[str, Any] = body.get("metrics") or {}
        reported: Mapping[str, Any] | None = metrics.get("speculative_decoding")
        return Acceptance(tuple(reported["acceptance_histogram"])) if reported else None

    def plus(self, other: Acceptance) -> Acceptance:
        """Both together. ValueError when they differ in K."""
        pairs = zip(self.histogram, other.histogram, strict=True)
        return Acceptance(tuple(a + b for a, b in pairs))

    @property
    def n_steps(self) -> int:
        """Verify steps."""
        return sum(self.histogram)

    @property
    def length(self) -> float:
        """Tokens per verify step, the bonus token included; 0 without a step."""
        if not self.n_steps:
            return 0.0
        return 1 + sum(j * n for j, n in enumerate(self.histogram)) / self.n_steps

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of steps that accept at least k drafts, k = 1..K; empty without a step."""
        if not self.n_steps:
            return ()
        return tuple(sum(self.histogram[k:]) / self.n_steps for k in range(1, len(self.histogram)))
