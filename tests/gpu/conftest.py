# ruff: noqa: TID251  (asked at collection, before any device is opened)
"""Everything here needs a CUDA GPU, is marked `gpu` and skipped without one.

Collected first, these modules import kernels: without a GPU the interpreter's, as tests/unit/kernels needs them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; skip them where torch sees no GPU."""
    missing = pytest.mark.skip(reason="needs a CUDA GPU; torch sees none")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)
