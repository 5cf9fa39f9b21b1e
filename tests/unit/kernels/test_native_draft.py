"""A drafter's context rows by the native library, as prefill writes them, equal those computed part by part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from k3_kernels.api import ReferenceDense
from k3_kernels.cpu import library
from k3_kernels.cpu.draft_ops import NativeDraft

from k3.config.resolve import EMBEDDED_MODEL
from k3.model.spec import K3Spec
from tests.compare import assert_close
from tests.draft_rings import World
from tests.drafters import random_drafter

pytestmark = [
    pytest.mark.dspark,
    pytest.mark.skipif(not library.is_built(), reason="no C++ compiler at install"),
]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_context_rows_equal_the_reference(
    tmp_path: Path, dtype: torch.dtype, tolerance: float
) -> None:
    spec = K3Spec.from_folder(EMBEDDED_MODEL)
    folder = random_drafter(tmp_path, spec, "mla", seed=6, block=5)
    ours, parts = (
        World.of(folder, ops, dtype, 5).drafter for ops in (NativeDraft(), ReferenceDense())
    )
    assert ours.context.at_once is not None
    assert parts.context.at_once is None
    random = torch.Generator().manual_seed(7)
    for n_tokens in (1, 8, 77):
        taps = torch.randn(n_tokens, len(ours.spec.taps), spec.hidden_size, generator=random)
        taps, positions = taps.to(dtype), torch.randperm(4000, generator=random)[:n_tokens]
        expected = parts.context(taps, positions)
        assert_close(ours.context(taps, positions), expected, tolerance, f"{n_tokens} tokens")
