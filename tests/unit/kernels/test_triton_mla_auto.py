"""Which backend a shape gets, and that the choice leaves the answer alone."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.api import BackendError, Backends, select
from k3_kernels.backends.auto import AutoAttention, prefers_flashmla

from tests.compare import assert_close
from tests.latent_steps import step


@pytest.mark.parametrize(
    "queries, keys, library",
    [(12, 1 << 20, False), (96, 4096, False), (96, 1 << 18, True), (768, 1 << 20, True)],
)
def test_the_library_is_for_many_queries_over_many_keys(
    queries: int, keys: int, library: bool
) -> None:
    assert prefers_flashmla(queries, keys) is library


def test_without_the_library_everything_is_ours_and_one_plan_serves_all_layers() -> None:
    case = step([[70, 71], [3, 4]], heads=3)
    ops = AutoAttention(2, None, hopper=False)
    plan = ops.plan(case.table_BW, case.bound_T, 2, 1 << 20, 64)
    expected, _ = case.reference(0.2, 32)
    for _ in range(2):
        o, _ = ops.decode(case.q_THK, case.cache_PTK, plan, 0.2, 32)
        assert_close(o.cpu(), expected.cpu(), 2e-6, "o")
    assert list(plan.plans) == [False]


@pytest.mark.parametrize("name", ["triton", "flashmla", "flashinfer"])
def test_a_gpu_backend_is_refused_on_cpu(name: str) -> None:
    with pytest.raises(BackendError, match=rf"attention='{name}'.*reference"):
        select(Backends(attention=name), torch.device("cpu"))
