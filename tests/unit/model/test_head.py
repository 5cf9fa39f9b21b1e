"""The best token of a vocabulary in slices is the one of the whole, whatever the values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3.model.layers import Head
from k3.parallel.mesh import Mesh
from tests.model_runner import OPS
from tests.thread_group import mesh_groups, run_group

NAN, LEAST = float("nan"), float("-inf")
ROWS = torch.tensor(
    [
        [0, 3, 1, 2, 3, 0, 3, 1],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [7, 6, 5, 4, 7, 2, 1, 0],
        [LEAST] * 8,
        [LEAST] * 6 + [-1, LEAST],
        [0.0, -0.0, 0, 0, 0, 0, 0, 0],
        [-0.0, 0.0, 0, 0, 0, 0, 0, 0],
        [9, 9, 9, 9, 9, NAN, 9, NAN],
        [1, NAN, 1, 1, NAN, 1, 1, 1],
    ]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(cp=2), Mesh(tp=2, cp=2), Mesh(cp=8)], ids=str)
def test_the_first_of_the_best_tokens_is_the_best(mesh: Mesh, dtype: torch.dtype) -> None:
    """Equal ones in one slice and in several, none above the least, no number."""
    groups = mesh_groups(mesh)
    random = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16()

    def best(rank: int) -> list[Tensor]:
        found: list[Tensor] = []
        for logits in (ROWS, random):
            own = logits.to(dtype).chunk(mesh.size, 1)[rank]
            head = Head(torch.empty(own.shape[1], 1), groups[rank].shard, OPS.dense)
            found.append(head.best(own))
        return found

    for found in run_group(mesh.size, best):
        for got, logits in zip(found, (ROWS, random), strict=True):
            assert torch.equal(got, logits.to(dtype).argmax(-1))


def test_doubles_that_singles_do_not_tell_apart_are_told_apart() -> None:
    groups = mesh_groups(Mesh(cp=2))
    logits = torch.tensor([[1, 1 + 2**-50, 1 + 2**-49, 1]], dtype=torch.float64)

    def best(rank: int) -> int:
        head = Head(torch.empty(2, 1), groups[rank].shard, OPS.dense)
        return int(head.best(logits.chunk(2, 1)[rank]))

    assert run_group(2, best) == [2, 2]
