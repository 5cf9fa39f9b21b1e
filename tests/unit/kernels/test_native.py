"""The native library computes what the references compute, in both dtypes it has, on odd shapes."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.api import BackendError, Backends, select
from k3_kernels.cpu import library
from k3_kernels.cpu.ops import NativeMix
from k3_kernels.reference import attnres
from torch import Tensor

from tests.compare import assert_close

pytestmark = pytest.mark.skipif(not library.is_built(), reason="no C++ compiler at install")
CPU = torch.device("cpu")
DTYPES = [(torch.float64, 1e-12), (torch.float32, 2e-5)]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4, 256), (3, 5, 77), (2, 1, 5), (0, 2, 8)])
def test_mixing_equals_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, tolerance: float
) -> None:
    n, candidates, width = shape
    frame = draw(n, candidates + 2, width, dtype=dtype)
    frame[:, candidates:] = torch.nan  # blocks that are not banked yet
    weight = draw(width, dtype=dtype, seed=1)
    x = frame[:, :candidates]
    assert_close(NativeMix()(x, weight, 1e-5), attnres.mix(x, weight, 1e-5), tolerance, "mixture")


def test_native_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(BackendError, match="runs on CPUs"):
        select(Backends(kda="native"), torch.device("meta"))
