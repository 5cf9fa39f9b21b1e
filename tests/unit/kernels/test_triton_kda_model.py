"""A whole model whose KDA layers run by the kernels gives what the reference gives; what they cannot do is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from k3_kernels.api import BackendError, Backends, select
from k3_kernels.triton.kda_ops import TritonKda

from k3.model.k3 import Stage
from k3.model.registry import open_stage
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import SOLO
from tests.compare import assert_close
from tests.kda_group import Group, Shape
from tests.model_runner import CPU, OPS, Pools, solo_stage

NANO = Path(__file__).parents[2] / "golden/k3"


@pytest.fixture(scope="module")
def stage() -> Stage:
    ops = replace(OPS, kda=TritonKda())
    return open_stage(NANO, SOLO, solo_groups(), ops, dtype="float32", device=CPU)


@pytest.mark.parametrize("group", [1, 2])
def test_the_model_gives_the_same_logits_through_groups_and_their_acceptance(
    stage: Stage, group: int
) -> None:
    ids = torch.randint(0, 512, (20,), generator=torch.Generator().manual_seed(group)).tolist()
    results = []
    for candidate in (stage, solo_stage(NANO, "float32")):
        pools = Pools(candidate, 1, 24, records=group if group > 1 else 0)
        request = pools.requests[0]
        pools.prefill(request, ids[:7], 4)
        steps = [
            pools.verify([(request, ids[at : at + group])], [accepted])
            for at, accepted in ((7, group - 1), (7 + group, 0))
        ]
        results.append(torch.stack(steps))
    assert_close(results[0], results[1], 2e-4, "logits")


@pytest.mark.parametrize(
    "head_dim, width, dtype",
    [(24, 4, torch.float32), (8, 4, torch.float32), (32, 1, torch.float32), (32, 4, torch.float64)],
)
def test_heads_the_kernels_cannot_compute_are_refused_at_load(
    head_dim: int, width: int, dtype: torch.dtype
) -> None:
    with pytest.raises(BackendError, match=r"set backends\.kda=reference"):
        TritonKda().require(head_dim, width, dtype)


def test_a_state_per_token_is_refused_with_the_remedy() -> None:
    group = Group.draw(Shape(1, 2, 1, 16, kept=2), 0)
    cache = replace(group.cache, columns=2, records=None)
    with pytest.raises(BackendError, match=r"set spec\.kda_rollback=replay"):
        TritonKda().group(
            group.u, group.raw, group.beta, group.rule, cache, group.slots, group.column
        )


def test_the_kernels_are_not_offered_without_a_gpu() -> None:
    with pytest.raises(BackendError, match="not available"):
        select(Backends(kda="triton"), torch.device("cpu"))
