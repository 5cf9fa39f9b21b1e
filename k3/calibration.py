"""What was measured for one drafter on one machine: steps per second by size, and what its confidence is worth.

The confidence head says how likely a draft is accepted if those before it are. Heads are over-confident away from what
they were trained on, so each position has a temperature: c becomes sigmoid(logit(c) / t). `fit` finds them from blocks
whose outcome is known. A `Calibration` is a JSON file that `spec.calibration` names; nothing stands in for it. Pure.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any, cast

from k3.errors import ConfigError

EPSILON = 1e-6  # confidences stay this far from 0 and 1
BINS = 20
GRID = tuple(round(0.5 + 0.05 * i, 2) for i in range(71))  # temperatures that are tried, 0.5 .. 4
REMEDY = "measure it with `k3-bench calibrate`"
LARGEST = 1e9  # no number of a calibration is larger
DRAFTING = ("tokens", "steps_per_s")  # fields of a file: sizes and rates of steps that draft
PLAIN = ("plain_rows", "plain_steps_per_s")  # and of steps that do not


@dataclass(frozen=True, slots=True)
class StepRates:
    """Steps per second by the number of tokens a step checks. tokens: ascending sizes that were measured.

    Groups are as wide as the plan says, so time grows evenly between two measured sizes; it grows in proportion beyond
    the largest, and below the smallest it is that of the smallest. With steps instead, a search that ends at the first
    draft that does not pay would end at every edge.
    """

    tokens: tuple[int, ...]
    per_s: tuple[float, ...]

    def at(self, n_tokens: int) -> float:
        """Steps per second of a step of `n_tokens` tokens."""
        i = bisect_left(self.tokens, n_tokens)
        if i == len(self.tokens):
            return self.per_s[-1] * self.tokens[-1] / n_tokens
        if i == 0 or self.tokens[i] == n_tokens:
            return self.per_s[i]
        low, high = self.tokens[i - 1], self.tokens[i]
        share = (n_tokens - low) / (high - low)
        return 1 / ((1 - share) / self.per_s[i - 1] + share / self.per_s[i])


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured for one drafter on one machine. drafter: digest of its folder.

    rates: of steps that draft, the drafter's time included. plain: of steps without drafts, a token for each row.
    """

    drafter: str
    temperatures: tuple[float, ...]
    rates: StepRates
    plain: StepRates

    def break_even(self, n_rows: int, group: int) -> float:
        """Drafts that must be accepted per row and step for groups of `group` tokens to beat plain decoding."""
        return max(0.0, self.plain.at(n_rows) / self.rates.at(n_rows * group) - 1.0)

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Raises ConfigError naming the file and what is wrong with it."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"spec.calibration={path}: {error}; {REMEDY}") from error
        return cls.of(document, str(path))

    @classmethod
    def of(cls, document: object, where: str) -> Calibration:
        """From parsed JSON. Raises ConfigError naming the field."""

        def wrong(field: str, expected: str) -> ConfigError:
            return ConfigError(f"spec.calibration={where}: {field}: expected {expected}; {REMEDY}")

        if not isinstance(document, dict):
            raise wrong("the file", "a JSON object")
        fields = cast("dict[str, Any]", document)
        drafter = fields.get("drafter")
        if not isinstance(drafter, str) or not drafter:
            raise wrong("drafter", "the digest of a drafter's folder")

        def numbers(name: str) -> tuple[float, ...]:
            found = fields.get(name)
            items = cast("list[Any]", found) if isinstance(found, list) else []
            if not items or not all(type(x) in (int, float) and 0 < x < LARGEST for x in items):
                raise wrong(name, "a list of positive numbers")
            return tuple(float(x) for x in items)

        def rates(sizes: str, name: str) -> StepRates:
            found, per_s = numbers(sizes), numbers(name)
            tokens = tuple(int(n) for n in found)
            if tokens != found or not all(a < b for a, b in pairwise(tokens)):
                raise wrong(sizes, "ascending whole numbers")
            if len(tokens) != len(per_s):
                raise wrong(name, f"one rate for each of the {len(tokens)} sizes in {sizes}")
            return StepRates(tokens, per_s)

        return cls(drafter, numbers("temperatures"), rates(*DRAFTING), rates(*PLAIN))

    def document(self) -> dict[str, object]:
        """What `of` reads."""
        return {
            "drafter": self.drafter,
            "temperatures": list(self.temperatures),
            DRAFTING[0]: list(self.rates.tokens),
            DRAFTING[1]: list(self.rates.per_s),
            PLAIN[0]: list(self.plain.tokens),
            PLAIN[1]: list(self.plain.per_s),
        }


def calibrated(confidence: Sequence[float], temperatures: Sequence[float]) -> list[float]:
    """sigmoid(logit(c_i) / t_i), kept away from 0 and 1."""
    pairs = zip(confidence, temperatures, strict=True)
    return [_clamp(_sigmoid(_logit(c) / t)) for c, t in pairs]


def fit(confidence: Sequence[Sequence[float]], accepted: Sequence[int]) -> tuple[float, ...]:
    """Temperatures from raw confidences of blocks and how many of their drafts were accepted.

    From left to right, each by a search over `GRID` for the least calibration error of the product up to there.
    """
    products = [1.0] * len(confidence)
    found: list[float] = []
    for i in range(len(confidence[0])):
        came = [a > i for a in accepted]
        told = [row[i] for row in confidence]
        tried = [(_scaled(products, told, t), t) for t in GRID]
        products, best = min(tried, key=lambda pair: calibration_error(pair[0], came))
        found.append(best)
    return tuple(found)


def _scaled(products: Sequence[float], told: Sequence[float], temperature: float) -> list[float]:
    pairs = zip(products, told, strict=True)
    return [p * _clamp(_sigmoid(_logit(c) / temperature)) for p, c in pairs]


def calibration_error(predicted: Sequence[float], came: Sequence[bool]) -> float:
    """Expected calibration error over `BINS` bins of equal width."""
    sums = [[0.0, 0.0] for _ in range(BINS)]
    for p, is_true in zip(predicted, came, strict=True):
        cell = sums[min(BINS - 1, int(p * BINS))]
        cell[0] += p
        cell[1] += is_true
    return sum(abs(p - n) for p, n in sums) / len(predicted)


def _clamp(c: float) -> float:
    return min(max(c, EPSILON), 1 - EPSILON)


def _logit(c: float) -> float:
    c = _clamp(c)
    return log(c / (1 - c))


def _sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))
