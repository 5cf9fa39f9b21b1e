"""How long the next chunk of a prompt may be so that every step takes equally long, whatever is cached before it.

Attention reads the whole prefix, so chunks of one length take longer and longer, and the stages of a pipeline wait for
the slowest. The time of a chunk of x tokens after L cached ones is taken as t(L, x) = c + g L + b x + a (2 L x + x^2);
the next length solves t(L, x) = t(0, budget). Only the ratios of c, g, b, a matter. Off by default: in hybrid models
few layers have the quadratic term. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """Coefficients of t(L, x): per step, per cached token, per token, per pair of tokens. budget: longest chunk."""

    step: float
    cached: float
    token: float
    pair: float
    budget: int

    def __post_init__(self) -> None:
        given = (self.step, self.cached, self.token, self.pair)
        if min(given) < 0 or self.token + self.pair <= 0:
            raise ValueError(
                f"chunk costs {given}: none may be negative, and tokens or pairs must cost something"
            )

    def seconds(self, before: int, length: int) -> float:
        """t(before, length), in the unit of the coefficients."""
        pairs = 2 * before * length + length * length
        return self.step + self.cached * before + self.token * length + self.pair * pairs

    def length(self, before: int, align: int) -> int:
        """Tokens of a chunk after `before` cached ones: multiples of `align`, at least one, at most the budget."""
        rest = self.step + self.cached * before - self.seconds(0, self.budget)
        slope = self.token + 2 * self.pair * before
        if self.pair > 0:
            root = math.sqrt(max(0.0, slope * slope - 4 * self.pair * rest))
            tokens = (root - slope) / (2 * self.pair)
        else:
            tokens = -rest / slope
        whole = int(tokens + 1e-9) // align * align
        return min(self.budget, max(align, whole))
