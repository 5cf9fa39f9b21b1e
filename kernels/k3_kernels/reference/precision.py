"""The precision rule every reference follows: statistics, softmax, gates and states in float32.

A float64 model computes them in float64, which is what makes greedy equality testable exactly.
"""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype of an activation dtype: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32
