"""Rings by absolute position: what is read are the newest rows of the window, also past the wrap; the rest is NaN."""

from __future__ import annotations

import pytest
import torch

from k3.model.draft_ring import DraftRing
from k3.model.dspark_spec import ring_places

pytestmark = pytest.mark.dspark

P, GROUP = 4, 8


def make(window: int, n_slots: int = 4, shape: tuple[int, ...] = (2,)) -> DraftRing:
    """Rows of one value per layer; NaN where nobody wrote."""
    places = ring_places(window, GROUP, P)
    return DraftRing(torch.full((n_slots * places, *shape, P, 1), float("nan")), places, window)


def rows(positions: torch.Tensor) -> torch.Tensor:
    """[T, 2 layers, 1]: the position itself, and its negative."""
    return torch.stack((positions, -positions), 1).unsqueeze(-1).float()


def write(ring: DraftRing, slot: int, positions: torch.Tensor) -> None:
    keep = torch.ones_like(positions, dtype=torch.bool)
    ring.write(rows(positions), torch.full_like(positions, slot), positions, keep)


@pytest.mark.parametrize("window", [4, 12, 64])
@pytest.mark.parametrize("base", [1, 3, 4, 5, 11, 12, 13, 31, 63, 64, 65, 97])
def test_a_block_sees_exactly_the_window_before_its_anchor(window, base):
    ring = make(window)
    write(ring, 2, torch.arange(base))
    for max_base in (base, base + 30, 10_000):
        context = ring.read(torch.tensor([2]), torch.tensor([0]), torch.tensor([base]), max_base)
        seen = context.rows[0, context.seen_BN[0], 0, 0].tolist()
        assert sorted(seen) == list(range(max(0, base - window), base))
        assert not context.rows.isnan().any()
        assert (context.layer(1, "mla")[context.seen_BN] <= 0).all()


def test_rows_before_the_start_of_a_cold_request_are_not_read():
    ring = make(12)
    write(ring, 1, torch.arange(40))  # an earlier holder of the slot
    write(ring, 1, torch.arange(20, 23))
    context = ring.read(torch.tensor([1]), torch.tensor([20]), torch.tensor([23]), 23)
    assert sorted(context.rows[0, context.seen_BN[0], 0, 0].tolist()) == [20, 21, 22]


def test_a_step_that_writes_a_whole_group_leaves_the_next_window_intact():
    """The slack beyond the window is what makes this true: the group's last row lands where nobody reads."""
    for window in (4, 12):
        ring = make(window)
        for base in range(1, 60):
            write(ring, 1, torch.arange(max(0, base - window), base))
            write(ring, 1, torch.arange(base, base + GROUP))
            new = base + 1  # everything but the anchor was rejected
            context = ring.read(torch.tensor([1]), torch.tensor([0]), torch.tensor([new]), new)
            seen = sorted(context.rows[0, context.seen_BN[0], 0, 0].tolist())
            assert seen == list(range(max(0, new - window), new))


def test_rows_that_are_not_kept_touch_only_the_scratch_slot():
    ring = make(12)
    before = ring.pool.clone()
    positions = torch.arange(5, 9)
    keep = torch.tensor([True, False, False, False])
    ring.write(rows(positions), torch.tensor([2, 2, 3, 3]), positions, keep)
    changed = (ring.pool != before) & ~(ring.pool.isnan() & before.isnan())
    touched = {
        unit // ring.places for unit in changed.flatten(1).any(1).nonzero().flatten().tolist()
    }
    assert touched == {0, 2}
    assert int(changed[2 * ring.places :].sum()) == 2  # one row of two layers


def test_requests_of_one_batch_read_their_own_rings():
    ring = make(12)
    write(ring, 1, torch.arange(7))
    write(ring, 3, torch.arange(100, 120))
    context = ring.read(torch.tensor([3, 1]), torch.tensor([0, 0]), torch.tensor([120, 7]), 120)
    first = sorted(context.rows[0, context.seen_BN[0], 0, 0].tolist())
    second = sorted(context.rows[1, context.seen_BN[1], 0, 0].tolist())
    assert (first, second) == (list(range(108, 120)), list(range(7)))


def test_rows_by_head_lie_the_same_way():
    ring = make(12, shape=(3, 2, 2))
    positions = torch.arange(9)
    values = torch.arange(9 * 12).view(9, 3, 2, 2, 1).float()
    keep = torch.ones(9, dtype=torch.bool)
    ring.write(values, torch.full((9,), 1), positions, keep)
    context = ring.read(torch.tensor([1]), torch.tensor([0]), torch.tensor([9]), 9)
    order = context.seen_BN[0].nonzero().flatten()
    assert torch.equal(context.rows[0, order], values)
    assert torch.equal(context.layer(1, "gqa")[0, order], values[:, :, 1])
