"""KDA kernels on the card: float32 and bfloat16 against float64, odd shapes, real widths, steps in a row, captured."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from k3_kernels.triton import kda_verify
from k3_kernels.triton.kda_ops import TritonKda

from tests.kda_group import Group, Shape, assert_same

SHAPES = [
    pytest.param(Shape(3, 8, 5, 128), id="groups of 8"),
    pytest.param(Shape(2, 5, 3, 16, kept=7), id="group of 5, room for 7"),
    pytest.param(Shape(2, 3, 2, 64, width=3, lower_bound=None, kept=3), id="softplus gate"),
    pytest.param(Shape(2, 8, 2, 32, lower_bound=-30.0), id="decay too strong to take apart"),
    pytest.param(Shape(2, 12, 2, 128, kept=12), id="group of 12"),
    pytest.param(Shape(30, 1, 96, 128, kept=0), id="one token, many programs"),
    pytest.param(Shape(3, 1, 5, 128, kept=0), id="one token, few programs"),
    pytest.param(Shape(3, 1, 5, 64, kept=1), id="one token with records"),
    pytest.param(Shape(40, 8, 12, 128), id="more heads than processors"),
]


def kda() -> TritonKda:
    """As the model gets it."""
    return TritonKda(hopper=torch.cuda.get_device_capability()[0] == 9)  # noqa: TID251


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_reference_in_float64(shape: Shape, dtype: torch.dtype) -> None:
    """Inputs are exact in both; the tolerance is float32's, with tf32 products taken three times."""
    group = Group.draw(shape, 11, dtype, "cuda")
    want = group.expected()
    c = group
    o = kda().group(c.u, c.raw, c.beta, c.rule, c.cache, c.slots, c.column)
    assert_same((o, group.cache), want, 1e-4)


@pytest.mark.parametrize("shape", SHAPES[:5])
def test_a_group_of_many_heads_equals_the_reference_too(shape: Shape) -> None:
    group = Group.draw(shape, 12, torch.bfloat16, "cuda")
    want = group.expected()
    c, o = group, torch.full(want[0].shape, float("nan"), device="cuda")
    many = kda_verify.tuned(1 << 20)
    kda_verify.verify(c.u, c.raw, c.beta, c.rule, c.cache, c.slots, c.column, o, many)
    assert_same((o, group.cache), want, 1e-4)


def test_a_captured_group_replays_on_what_its_buffers_hold() -> None:
    group = Group.draw(Shape(2, 4, 3, 128, kept=4), 3, torch.bfloat16, "cuda")
    ops, eager, captured = kda(), group.copy(), group.copy()

    def run(c: Group) -> torch.Tensor:
        return ops.group(c.u, c.raw, c.beta, c.rule, c.cache, c.slots, c.column)

    run(group.copy())  # compiles
    graph = torch.cuda.CUDAGraph()  # noqa: TID251
    with torch.cuda.graph(graph):  # noqa: TID251
        got = run(captured)
    for accepted in (2, 0):
        graph.replay()
        want = run(eager)
        assert torch.equal(got, want)
        assert torch.equal(
            captured.cache.states.nan_to_num(7.0), eager.cache.states.nan_to_num(7.0)
        )
        group.column.fill_(accepted)  # the same tensor in all three
