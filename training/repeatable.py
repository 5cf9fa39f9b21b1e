"""Sums in a fixed order, so that two runs of the same steps give the same bits.

Without it flash attention's backward adds with atomics and two runs drift apart. Held by `training.check_repeat`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fixed_order(is_on: bool = True) -> Iterator[None]:
    """Every operation inside has one order of additions, or raises RuntimeError when it knows none."""
    if not is_on:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS first starts
    torch.use_deterministic_algorithms(True)
    # costs passes and orders nothing
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
