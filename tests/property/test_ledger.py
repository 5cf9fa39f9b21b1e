"""Laws of the ledger: every position has one place, and nothing else has it."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from decode_svc.capacity import table_width, worst_len
from decode_svc.ledger import Ledger
from tests.helix_formulas import global_to_local, group_share, local_to_global

pytestmark = pytest.mark.helix

ledgers = st.builds(Ledger, st.integers(1, 9), st.integers(1, 6))
lengths = st.integers(0, 400)


@given(ledgers, lengths)
def test_every_position_has_exactly_one_place(ledger: Ledger, n: int) -> None:
    places = {(ledger.owner(p), ledger.local_index(p)) for p in range(n)}
    assert len(places) == n
    for r in range(ledger.cp):
        mine = ledger.positions(n, r)
        assert [ledger.local_index(p) for p in mine] == list(range(ledger.local_len(n, r)))
        assert all(ledger.owner(p) == r for p in mine)


@given(ledgers, lengths)
def test_local_lengths_add_up_and_differ_by_a_page_at_most(ledger: Ledger, n: int) -> None:
    local = [ledger.local_len(n, r) for r in range(ledger.cp)]
    assert sum(local) == n
    assert max(local) - min(local) <= ledger.page_tokens
    assert ledger.local_index(n) == ledger.local_len(n, ledger.owner(n))


@given(ledgers, lengths)
def test_pages_suffice_and_the_last_one_is_needed(ledger: Ledger, n: int) -> None:
    pages = ledger.pages(n)
    content = [ledger.content_pages(n, r) for r in range(ledger.cp)]
    assert max(content, default=0) == pages
    for r, n_pages in enumerate(content):
        assert (
            n_pages
            == len(ledger.prompt_pages(n, r))
            == -(-ledger.local_len(n, r) // ledger.page_tokens)
        )


@given(ledgers, lengths, st.integers(1, 9), st.lists(st.integers(0, 8), max_size=12))
def test_after_any_rewinds_every_live_position_lies_in_its_place(
    ledger: Ledger, n: int, group: int, accepted: list[int]
) -> None:
    """Rejected tokens stay as garbage beyond the live length and are overwritten before they could be seen."""
    memory = {(ledger.owner(p), ledger.local_index(p)): p for p in range(n)}
    base = n
    for a in accepted:
        for r in range(ledger.cp):
            for i, slot in enumerate(group_share(ledger, base, group, r).slots):
                if slot >= 0:
                    memory[r, slot] = base + i
        base += min(a, group - 1) + 1
        assert all(memory[ledger.owner(p), ledger.local_index(p)] == p for p in range(base))


@given(ledgers, lengths, st.integers(1, 12))
def test_one_rank_writes_each_token_and_bounds_grow_with_it(
    ledger: Ledger, base: int, group: int
) -> None:
    shares = [group_share(ledger, base, group, r) for r in range(ledger.cp)]
    for i in range(group):
        assert sum(share.slots[i] >= 0 for share in shares) == 1
        assert sum(share.bounds[i] for share in shares) == base + i + 1
    for share in shares:
        assert list(share.bounds) == sorted(share.bounds)
        assert all(s < b for s, b in zip(share.slots, share.bounds, strict=True))


@given(ledgers, st.integers(0, 500))
def test_conversions_never_promise_more_than_is_paid(ledger: Ledger, tokens: int) -> None:
    assert local_to_global(ledger, global_to_local(ledger, tokens)) >= tokens
    assert global_to_local(ledger, local_to_global(ledger, tokens)) <= tokens


@given(
    ledgers,
    st.integers(1, 200),
    st.integers(1, 200),
    st.integers(0, 7),
    st.integers(0, 1),
    st.data(),
)
def test_the_worst_case_covers_every_course_of_a_request(
    ledger: Ledger, n: int, m: int, k: int, in_flight: int, data: st.DataObject
) -> None:
    """Any acceptance, planned with upper bounds, stays inside the reservation and the table."""
    worst = worst_len(n, m, k, in_flight)
    assert worst >= n
    assert ledger.pages(worst) <= max(table_width(ledger, n + m, k, in_flight), ledger.pages(n))
    outputs, flying = 1, 0
    while outputs < m:
        if outputs + flying < m and flying <= in_flight:
            bound = n + outputs - 1 + flying * (k + 1)
            assert bound + k + 1 <= worst
            flying += 1
        else:
            outputs += data.draw(st.integers(1, k + 1))
            flying -= 1
