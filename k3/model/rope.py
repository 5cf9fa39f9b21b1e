"""Rotary positions of a drafter: plain or YaRN frequencies, amplitude, and how a configuration spells them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3.model.fields import Fields


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of the drafter's positions. yarn None: plain. dim: rotated width of a head."""

    theta: float
    dim: int
    is_interleaved: bool
    yarn: Yarn | None

    def frequencies(self) -> tuple[float, ...]:
        """Inverse frequencies, dim / 2 of them."""
        plain = [self.theta ** (-2 * i / self.dim) for i in range(self.dim // 2)]
        if self.yarn is None:
            return tuple(plain)
        y = self.yarn
        low = max(math.floor(self._turns(y.beta_fast)), 0)
        high = float(min(math.ceil(self._turns(y.beta_slow)), self.dim - 1))
        if low == high:
            high += 0.001
        ramps = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(self.dim // 2)]
        return tuple(
            f / y.factor * ramp + f * (1 - ramp) for f, ramp in zip(plain, ramps, strict=True)
        )

    def _turns(self, rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        assert self.yarn is not None
        ratio = self.yarn.original / (2 * math.pi * rotations)
        return self.dim * math.log(ratio) / (2 * math.log(self.theta))

    @property
    def amplitude(self) -> float:
        """Factor of cosine and sine."""
        y = self.yarn
        if y is None:
            return 1.0
        if y.attention_factor is not None:
            return y.attention_factor
        if y.mscale and y.mscale_all_dim:
            return mscale(y.factor, y.mscale) / mscale(y.factor, y.mscale_all_dim)
        return mscale(y.factor, 1.0)


@dataclass(frozen=True, slots=True)
class Yarn:
    """Constants of the YaRN extension."""

    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    attention_factor: float | None


def mscale(factor: float, weight: float) -> float:
    """How much attention grows with the extension by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def read_rope(top: Fields, dim: int, *, is_interleaved: bool) -> Rope:
    """`rope_parameters`, or `rope_theta` beside a nullable `rope_scaling`."""
    if "rope_parameters" in top.values:
        section = top.section("rope_parameters")
        theta = section.number("rope_theta")
    else:
        theta = top.number("rope_theta")
        if top.values.get("rope_scaling") is None:
            return Rope(theta, dim, is_interleaved, None)
        section = top.section("rope_scaling")
    name = "rope_type" if "rope_type" in section.values else "type"
    if section.choice(name, "default", "yarn") == "default":
        return Rope(theta, dim, is_interleaved, None)
    fast, slow = section.nullable_number("beta_fast"), section.nullable_number("beta_slow")
    yarn = Yarn(
        factor=section.number("factor"),
        original=section.size("original_max_position_embeddings"),
        beta_fast=32.0 if fast is None else fast,
        beta_slow=1.0 if slow is None else slow,
        mscale=section.nullable_number("mscale"),
        mscale_all_dim=section.nullable_number("mscale_all_dim"),
        attention_factor=section.nullable_number("attention_factor"),
    )
    return Rope(theta, dim, is_interleaved, yarn)
