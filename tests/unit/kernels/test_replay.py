"""Replay of recorded group tokens against a state per token: the same bits, whatever was accepted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from k3_kernels.api import ReferenceKda
from k3_kernels.reference import kda, replay
from torch import Tensor

from tests.compare import assert_close

pytestmark = pytest.mark.dspark

NAN = float("nan")
HEADS, DIM, SLOTS = 2, 5, 4
seeds = st.integers(0, 2**31 - 1)


class Tokens:
    """Random groups of a width, for some rows."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=self.dtype)

    def group(self, rows: int, width: int) -> tuple[Tensor, ...]:
        """q, k, v, g, beta."""
        shape = (rows, width, HEADS, DIM)
        q, k = (kda.l2_normalize(self.draw(*shape), 1e-6) for _ in range(2))
        beta = torch.sigmoid(self.draw(*shape[:3]))
        return q, k, self.draw(*shape), -self.draw(*shape).abs(), beta

    def below(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.generator))


@given(seeds, st.integers(1, 8), st.sampled_from([torch.float32, torch.float64]))
def test_both_forms_give_the_same_bits_over_any_history(
    seed: int, widest: int, dtype: torch.dtype
) -> None:
    """Groups of changing width, rows that sit steps out, slots that change hands."""
    tokens, ops = Tokens(seed, dtype), ReferenceKda()
    snapshots = torch.full((SLOTS * widest, HEADS, DIM, DIM), NAN, dtype=dtype)
    states = torch.full((SLOTS, HEADS, DIM, DIM), NAN, dtype=dtype)
    records = torch.full((SLOTS, HEADS, 3, widest, DIM), NAN, dtype=dtype)
    column = dict.fromkeys(range(SLOTS), -1)
    for slot in range(SLOTS):
        states[slot] = snapshots[slot * widest] = tokens.draw(HEADS, DIM, DIM)
    for step in range(6):
        if step == 3:  # another request is transferred into slot 1
            states[1] = snapshots[widest] = tokens.draw(HEADS, DIM, DIM)
            column[1] = -1
        rows = torch.randperm(SLOTS, generator=tokens.generator)[: 1 + tokens.below(SLOTS)]
        width = 1 + tokens.below(widest)
        group = tokens.group(len(rows), width)
        read = torch.tensor([column[slot] for slot in rows.tolist()])
        expected = ops.verify(*group, snapshots, rows, read, widest)
        got = ops.verify(*group, states, rows, read, 1, records)
        assert torch.equal(got, expected), f"seed {seed} step {step}"
        column |= {slot: tokens.below(width) for slot in rows.tolist()}


def test_the_closed_form_of_the_fold_agrees() -> None:
    """What a kernel computes with one matrix product instead of token by token."""
    tokens = Tokens(5, torch.float64)
    state, records = tokens.draw(3, HEADS, DIM, DIM), tokens.draw(3, HEADS, 3, 7, DIM)
    records[:, :, replay.DECAY] = -records[:, :, replay.DECAY].abs()
    read = torch.tensor([6, -1, 2])
    folded = state.clone()
    replay.fold(folded, records, read)
    for b, a in enumerate(read.tolist()):
        k, u, g = records[b, :, :, : a + 1].unbind(1)  # [H, a + 1, D]
        total = g.cumsum(1)
        last = total[:, -1:] if a >= 0 else torch.zeros(HEADS, 1, DIM, dtype=torch.float64)
        closed = state[b] * last.exp() + u.transpose(1, 2) @ ((last - total).exp() * k)
        assert_close(folded[b], closed, 1e-12, f"row {b}")


def test_other_slots_and_records_beyond_the_group_are_not_touched() -> None:
    tokens = Tokens(8, torch.float32)
    states = torch.full((3, HEADS, DIM, DIM), NAN)
    records = torch.full((3, HEADS, 3, 6, DIM), NAN)
    states[1] = 0
    slots, fresh = torch.tensor([1]), torch.tensor([-1])
    replay.verify(*tokens.group(1, 4), states, records, slots, fresh)
    assert bool(states[[0, 2]].isnan().all())
    assert bool(records[[0, 2]].isnan().all())
    assert bool(records[1, :, :, 4:].isnan().all())
    assert bool((states[1] == 0).all()), "the state before the group stays until it is judged"
    assert bool(records[1, :, :, :4].isfinite().all())
