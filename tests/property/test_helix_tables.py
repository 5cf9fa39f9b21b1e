"""Laws of the device tables and of the merge: what ranks derive fits together whatever the sizes."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from k3_kernels.reference.lse import merge
from k3_kernels.reference.tables import verify_tables
from torch import Tensor

from decode_svc.ledger import Ledger
from tests.helix_formulas import group_share

pytestmark = pytest.mark.helix

ledgers = st.builds(Ledger, st.integers(1, 9), st.integers(1, 6))
bases = st.integers(0, 200)
groups = st.integers(1, 9)
seeds = st.integers(0, 2**31)


def page_table(ledger: Ledger, n: int, seed: int) -> Tensor:
    """Scrambled page ids, enough for `n` tokens."""
    make = torch.Generator().manual_seed(seed)
    return torch.randperm(ledger.pages(n) + 3, generator=make)[: ledger.pages(n)].to(torch.int32)


def tables(ledger: Ledger, pages: Tensor, base: int, group: int, r: int) -> tuple[Tensor, Tensor]:
    valid = torch.ones(1, group, dtype=torch.bool)
    at = torch.tensor([base])
    _, slot, bound = verify_tables(at, pages[None], valid, ledger.page_tokens, ledger.cp, r)
    return slot, bound


@given(ledgers, bases, groups, seeds)
def test_the_device_derives_what_the_ledger_says(
    ledger: Ledger, base: int, group: int, seed: int
) -> None:
    pages = page_table(ledger, base + group, seed)
    for r in range(ledger.cp):
        slot, bound = tables(ledger, pages, base, group, r)
        share = group_share(ledger, base, group, r)
        assert bound.tolist() == list(share.bounds)
        for i, local in enumerate(share.slots):
            expected = -1 if local < 0 else ledger.pool_slot(base + i, pages.tolist())
            assert int(slot[i]) == expected


@given(ledgers, bases, st.integers(0, 8), groups, seeds)
def test_two_steps_agree_on_every_position_both_cover(
    ledger: Ledger, base: int, later: int, group: int, seed: int
) -> None:
    """A rejected token's slot is overwritten by the token that rightfully follows."""
    pages = page_table(ledger, base + later + group, seed)
    for r in range(ledger.cp):
        first, _ = tables(ledger, pages, base, group, r)
        second, _ = tables(ledger, pages, base + later, group, r)
        for i in range(later, group):
            assert int(first[i]) == int(second[i - later])


@given(ledgers, st.lists(st.integers(1, 60), min_size=2, max_size=4), seeds)
def test_no_two_live_tokens_of_any_requests_share_a_place(
    ledger: Ledger, lengths: list[int], seed: int
) -> None:
    needed = [ledger.pages(n) for n in lengths]
    ids = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed))
    places: set[tuple[int, int]] = set()
    for n, pages in zip(lengths, ids.to(torch.int32).split(needed), strict=True):
        for r in range(ledger.cp):
            slots = [s for s in tables(ledger, pages, 0, n, r)[0].tolist() if s >= 0]
            places |= {(r, slot) for slot in slots}
    assert len(places) == sum(lengths)


@given(st.integers(1, 12), st.integers(1, 5), seeds)
def test_merging_any_shares_of_the_keys_gives_the_whole(n_keys: int, cp: int, seed: int) -> None:
    """Keys dealt to ranks at random, empty shares poisoned, ranks in any order."""
    make = torch.Generator().manual_seed(seed)
    score = torch.randn(n_keys, generator=make, dtype=torch.float64) * 5
    value = torch.randn(n_keys, 3, generator=make, dtype=torch.float64)
    owner = torch.randint(0, cp, (n_keys,), generator=make)
    o = torch.full((cp, 1, 1, 3), float("nan"), dtype=torch.float64)
    log_sum = torch.full((cp, 1, 1), float("-inf"), dtype=torch.float64)
    for r in owner.unique().tolist():
        mine = owner == r
        o[r, 0, 0] = score[mine].softmax(0) @ value[mine]
        log_sum[r] = score[mine].logsumexp(0)
    order = torch.randperm(cp, generator=make)
    merged, total = merge(o[order], log_sum[order])
    assert torch.allclose(merged[0, 0], score.softmax(0) @ value, atol=1e-12, rtol=0)
    assert torch.allclose(total[0, 0], score.logsumexp(0), atol=1e-12, rtol=0)
