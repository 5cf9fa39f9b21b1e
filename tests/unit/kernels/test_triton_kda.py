"""KDA kernels in Triton's interpreter equal the reference in float64, and touch nothing but their rows.

Errors are float32's: a state of D channels sums D products of numbers around one, and grows by G tokens.
"""

from __future__ import annotations

import pytest
import torch
from k3_kernels.triton import kda_decode, kda_verify

from tests.kda_group import NAN, Group, Shape, assert_same

SHAPES = [
    pytest.param(Shape(2, 5, 3, 16, kept=6), id="group of 5, room for 6"),
    pytest.param(Shape(1, 8, 1, 64), id="group of 8, 64 channels"),
    pytest.param(Shape(3, 1, 2, 16, width=3, kept=1), id="group of 1, width 3"),
    pytest.param(Shape(1, 3, 2, 32, lower_bound=None, kept=4), id="softplus gate"),
    pytest.param(Shape(1, 8, 1, 16, lower_bound=-30.0), id="decay too strong to take apart"),
    pytest.param(Shape(1, 9, 1, 16, width=2, kept=9), id="group of 9"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("programs", [1, 400, 4096])
def test_a_group_as_one_block_equals_token_by_token(shape: Shape, programs: int) -> None:
    group = Group.draw(shape, 3)
    want = group.expected()
    o = torch.full(want[0].shape, NAN)
    arguments = (group.u, group.raw, group.beta, group.rule, group.cache, group.slots)
    kda_verify.verify(*arguments, group.column, o, kda_verify.tuned(programs))
    assert_same((o, group.cache), want, 2e-5)


def test_three_steps_in_a_row_leave_the_state_of_the_accepted_tokens() -> None:
    shape = Shape(2, 4, 1, 16, kept=4)
    mine = Group.draw(shape, 5)
    exact = mine.copy(torch.float64)
    for step, accepted in enumerate((0, 3, 1)):
        o = torch.full(mine.raw.shape, NAN)
        kda_verify.verify(
            mine.u, mine.raw, mine.beta, mine.rule, mine.cache, mine.slots, mine.column, o
        )
        want = exact.expected()
        assert_same((o, mine.cache), want, 5e-5)
        fresh = Group.draw(shape, 6 + step)
        column = torch.full_like(mine.column, accepted)
        mine = Group(fresh.u, fresh.raw, fresh.beta, mine.rule, mine.cache, mine.slots, column)
        exact = Group(
            fresh.u.double(),
            fresh.raw.double(),
            fresh.beta.double(),
            exact.rule,
            want[1],
            exact.slots,
            column,
        )


@pytest.mark.parametrize("dim, width, bound", [(16, 4, -5.0), (64, 2, None), (128, 3, -5.0)])
@pytest.mark.parametrize("programs", [1, 4096])
def test_one_token_equals_the_recurrence(
    dim: int, width: int, bound: float | None, programs: int
) -> None:
    group = Group.draw(Shape(2, 1, 2, dim, width, kept=0, lower_bound=bound), dim)
    want = group.expected()
    o = torch.full((2, 2, dim), NAN)
    kda_decode.decode(
        group.u[:, 0],
        group.raw[:, 0],
        group.beta[:, 0],
        group.rule,
        group.cache,
        group.slots,
        o,
        tuning=kda_decode.tuned(programs),
    )
    assert_same((o.unsqueeze(1), group.cache), want, 2e-5)


@pytest.mark.parametrize("programs", [1, 4096])
def test_float16_inputs_are_widened_before_they_are_used(programs: int) -> None:
    group = Group.draw(Shape(1, 3, 2, 32, kept=3), 2, dtype=torch.float16)
    want = group.expected()
    o = torch.full(want[0].shape, NAN)
    arguments = (group.u, group.raw, group.beta, group.rule, group.cache, group.slots)
    kda_verify.verify(*arguments, group.column, o, kda_verify.tuned(programs))
    assert_same((o, group.cache), want, 2e-5)


@pytest.mark.parametrize("programs", [1, 400, 4096])
def test_what_only_hopper_has_is_asked_of_hopper_alone(programs: int) -> None:
    verify = kda_verify.tuned(programs)
    assert not verify.hopper
    assert not kda_decode.tuned(programs).fetch
