"""One operation between two sublayers equals its parts, bit for bit, wherever the residual stream is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from k3_kernels.api import Backends, select
from k3_kernels.reference import attnres

from tests.model_runner import CPU, Pools, solo_stage

NANO = Path(__file__).parents[2] / "golden/k3"
PARTS = select(Backends("reference", "reference", "reference"), CPU)
AT_ONCE = replace(PARTS, read=attnres.read)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tap_stream", ["prefix", "mixture"])
def test_one_operation_between_sublayers_equals_its_parts(tap_stream: str, dtype: str) -> None:
    """Outputs that wait are in every tap and in the frame that leaves."""
    frames = []
    for ops in (PARTS, AT_ONCE):
        stage = solo_stage(NANO, dtype, taps=(-1, 0, 2, 5, 8), tap_stream=tap_stream, ops=ops)
        pools = Pools(stage, 1, 19)
        frames.append(pools.chunk([(pools.requests[0], list(range(3, 14)))]).frame)
    assert bool(frames[0].data_TUH.isfinite().all())
    assert torch.equal(frames[0].data_TUH, frames[1].data_TUH)
