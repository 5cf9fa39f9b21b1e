"""Between torch and the library: a function pair by dtype, and what every argument is checked for.

Operations are for float32 and float64 on a CPU. Their last axis is contiguous, or they copy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3_kernels.cpu import library

SUFFIX = {torch.float32: "f32", torch.float64: "f64"}
DTYPES = frozenset(SUFFIX)


def pair(name: str) -> dict[torch.dtype, Callable[..., None]]:
    """The function of each dtype. Raises LibraryError."""
    return {dtype: library.function(f"{name}_{suffix}") for dtype, suffix in SUFFIX.items()}


def rows(x: Tensor) -> Tensor:
    """`x` with a contiguous last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` as rows of its last axis, and the values from row to row."""
    if x.dim() == 2:
        x = rows(x)
        return x, x.stride(0)
    return x.contiguous(), x.shape[-1]
