"""One way to compare tensors: the failure says how far apart they are and where it starts."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_close(got: Tensor, expected: Tensor, atol: float, what: str = "tensor") -> None:
    """Equal shapes, NaN and infinities in the same places, and at most `atol` apart elsewhere."""
    assert got.shape == expected.shape, (
        f"{what}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    )
    g, e = got.double(), expected.double()
    same = (g == e) | (g.isnan() & e.isnan())
    difference = torch.where(same, 0.0, (g - e).abs().nan_to_num(float("inf")))
    worst = float(difference.max()) if difference.numel() else 0.0
    if worst > atol:
        first = (difference > atol).nonzero()[0].tolist()
        finite = e.isfinite() & g.isfinite()
        scale = float(e[finite].square().mean().sqrt()) if finite.any() else float("nan")
        rms = float((g - e)[finite].square().mean().sqrt()) / max(scale, 1e-300)
        at = tuple(first)
        raise AssertionError(
            f"{what}: max abs {worst:.3e} (allowed {atol:.1e}), relative RMS {rms:.3e}, "
            f"first at {first}: {float(g[at])!r} instead of {float(e[at])!r}"
        )
