"""Laws of resharding: every byte that a decode rank must hold arrives exactly once, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from k3.errors import LayoutMismatch
from k3.model.spec import K3Spec
from k3.transfer.agent import Lists
from k3.transfer.peers import Link, Peer
from k3.transfer.pieces import draft_shares, shares
from k3.transfer.plan import Pair, Sharding, check_pair, expected_senders, owned_pages
from k3.v1 import plan_pb2, prefill_pb2
from tests.resharding import (
    PAGE_TOKENS,
    Truth,
    draw_draft_rows,
    make_draft,
    make_ranks,
    make_spec,
    put,
    put_draft,
    sharding,
)

HEADS = 24


@st.composite
def pairs(draw: st.DrawFn) -> tuple[K3Spec, Sharding, Sharding]:
    """A model and two shapes that fit; stages without a layer kind are common."""
    kinds = draw(st.text("km", min_size=3, max_size=6))
    spec = make_spec(kinds, HEADS)
    n = len(kinds)

    def bounds(pp: int) -> tuple[int, ...]:
        inner = draw(st.sets(st.integers(1, n - 1), min_size=pp - 1, max_size=pp - 1))
        return (0, *sorted(inner), n)

    pp, tp = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4, 8]))
    dpp, dtp, dcp = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 2, 4])),
    )
    assume(max(tp, dtp * dcp) % min(tp, dtp * dcp) == 0)
    columns = draw(st.sampled_from([1, 3]))
    prefill = sharding(n, pp=pp, tp=tp, bounds=bounds(pp), n_pages=19, n_slots=3, columns=columns)
    columns = draw(st.sampled_from([1, 8]))
    decode = sharding(
        n, pp=dpp, tp=dtp, cp=dcp, bounds=bounds(dpp), n_pages=18, n_slots=4, columns=columns
    )
    return spec, prefill, decode


@given(
    pair=pairs(),
    prompt_len=st.integers(1, 70),
    cut=st.integers(0, 18),
    max_bytes=st.sampled_from([1, 200, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_every_byte_of_every_receiver_is_written_once_and_no_other(
    pair, prompt_len, cut, max_bytes, seed
):
    spec, prefill, decode = pair
    n_pages = -(-prompt_len // PAGE_TOKENS)
    random = np.random.default_rng(seed)
    source_pages = random.permutation(prefill.n_pages)[:n_pages].tolist()
    target_pages = random.permutation(decode.n_pages).tolist()
    truth = Truth.draw(spec, n_pages, seed)
    senders, receivers, expected = (
        make_ranks(spec, prefill),
        make_ranks(spec, decode),
        make_ranks(spec, decode),
    )
    put(truth, prefill, senders, source_pages, slot=2, owner=False)
    put(truth, decode, expected, target_pages, slot=3, owner=True)
    written = [{name: np.zeros_like(pool) for name, pool in r.pools.items()} for r in receivers]
    plan = Pair.of(spec, prefill, decode)
    heard: dict[int, set[int]] = {receiver: set() for receiver in range(decode.size)}
    cut = min(cut, n_pages)
    copies = [
        plan_pb2.CopyPages(first_page=0, pages=source_pages[:cut]),
        plan_pb2.CopyPages(first_page=cut, pages=source_pages[cut:], last=True, state_slot=2),
    ]
    for sender, rank in enumerate(senders):
        for receiver in range(decode.size):
            links = tuple(Link(rows, Lists(0)) for rows in plan.rows(rank.layout, sender, receiver))
            peer = Peer("peer", plan, {}, {receiver: links})
            for copy in copies:
                for share in shares(peer, sender, receiver, copy, target_pages, 3, max_bytes):
                    rows = share.link.rows
                    assert len(share.source) == 1 or rows.length * len(share.source) <= max_bytes
                    heard[receiver].add(sender)
                    for s, t in zip(share.source.tolist(), share.target.tolist(), strict=True):
                        _copy(rows, s, t, rank, receivers[receiver], written[receiver])
    for receiver in range(decode.size):
        for name, pool in receivers[receiver].pools.items():
            np.testing.assert_array_equal(pool, expected[receiver].pools[name], err_msg=name)
            assert written[receiver][name].max(initial=0) <= 1, f"{name}: a byte was written twice"
        found = expected_senders(
            spec,
            prefill,
            decode,
            page_tokens=PAGE_TOKENS,
            prompt_len=prompt_len,
            rank=receiver,
        )
        assert found == tuple(sorted(heard[receiver]))


def _copy(rows, s, t, sender, receiver, written):
    """Apply one piece by its strided description."""
    source, target = sender.pools[rows.pool].reshape(-1), receiver.pools[rows.pool].reshape(-1)
    row, unit = divmod(s, rows.source_units)
    begin = rows.source_offsets[row] + unit * rows.source_stride
    row, unit = divmod(t, rows.target_units)
    end = rows.target_offsets[row] + unit * rows.target_stride
    target[end : end + rows.length] = source[begin : begin + rows.length]
    written[rows.pool].reshape(-1)[end : end + rows.length] += 1


@pytest.mark.dspark
@given(
    flavour=st.sampled_from(["mla", "gqa"]),
    pp=st.integers(1, 2),
    tp=st.sampled_from([1, 2, 4]),
    dpp=st.integers(1, 2),
    dtp=st.sampled_from([1, 2]),
    dcp=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([4, 12, 40]),
    prompt_len=st.integers(1, 70),
    cut=st.integers(0, 18),
    max_bytes=st.sampled_from([1, 300, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_draft_rows_of_the_window_reach_every_ring_once_and_nothing_else_is_touched(
    flavour, pp, tp, dpp, dtp, dcp, window, prompt_len, cut, max_bytes, seed
):
    assume(max(tp, dtp * dcp) % min(tp, dtp * dcp) == 0)
    spec, draft = make_spec("kmkm", HEADS), make_draft(flavour)
    prefill = sharding(4, pp=pp, tp=tp, n_pages=19, n_slots=3)
    decode = sharding(4, pp=dpp, tp=dtp, cp=dcp, n_pages=18, n_slots=4, columns=8, window=window)
    n_pages, slot, q = -(-prompt_len // PAGE_TOKENS), 3, decode.draft_places
    source_pages = np.random.default_rng(seed).permutation(prefill.n_pages)[:n_pages].tolist()
    rows = draw_draft_rows(draft, n_pages, seed)
    senders, receivers = make_ranks(spec, prefill, draft), make_ranks(spec, decode, draft)
    expected = make_ranks(spec, decode, draft)
    put_draft(rows, prefill, senders, dict(enumerate(source_pages)))
    oldest = max(0, prompt_len - window) // PAGE_TOKENS
    put_draft(rows, decode, expected, {b: slot * q + b % q for b in range(oldest, n_pages)})
    plan, cut = Pair.of(spec, prefill, decode), min(cut, n_pages)
    start = plan_pb2.StartTransfer(
        prompt_len=prompt_len,
        send_draft=True,
        destination=prefill_pb2.Destination(draft_slot=slot, state_slot=slot),
    )
    copies = [
        plan_pb2.CopyPages(first_page=0, pages=source_pages[:cut]),
        plan_pb2.CopyPages(first_page=cut, pages=source_pages[cut:], last=True),
    ]
    written = [{name: np.zeros_like(pool) for name, pool in r.pools.items()} for r in receivers]
    for receiver in range(decode.size):
        heard: set[int] = set()
        for sender, rank in enumerate(senders):
            links = tuple(Link(r, Lists(0)) for r in plan.rows(rank.layout, sender, receiver))
            peer = Peer("peer", plan, {}, {receiver: links})
            for copy in copies:
                for share in draft_shares(peer, receiver, copy, start, PAGE_TOKENS, max_bytes):
                    heard.add(sender)
                    for s, t in zip(share.source.tolist(), share.target.tolist(), strict=True):
                        _copy(share.link.rows, s, t, rank, receivers[receiver], written[receiver])
        heads = draft.split_axes().get("key heads")
        assert plan.draft_senders(receiver, heads) == tuple(sorted(heard))
        for name, pool in receivers[receiver].pools.items():
            np.testing.assert_array_equal(pool, expected[receiver].pools[name], err_msg=name)
            assert written[receiver][name].max(initial=0) <= 1, f"{name}: a byte was written twice"


@pytest.mark.dspark
def test_without_a_ring_or_with_another_drafter_no_draft_row_moves():
    spec, draft = make_spec("km", HEADS), make_draft("mla")
    prefill, cold = sharding(2), sharding(2)
    plan = Pair.of(spec, prefill, cold)
    rows = plan.rows(make_ranks(spec, prefill, draft)[0].layout, 0, 0)
    assert "draft" not in {row.pool for row in rows}
    assert plan.draft_senders(0, None) == ()


@given(first=st.integers(0, 40), n=st.integers(0, 40), cp=st.integers(1, 5))
def test_every_page_has_one_owner(first, n, cp):
    owned = [page for rank in range(cp) for page in owned_pages(first, n, cp, rank)]
    assert sorted(owned) == list(range(first, first + n))
    assert all(page % cp == rank for rank in range(cp) for page in owned_pages(first, n, cp, rank))


@given(pair=pairs(), n_pages=st.integers(0, 12))
def test_receivers_and_senders_are_two_views_of_one_relation(pair, n_pages):
    spec, prefill, decode = pair
    plan = Pair.of(spec, prefill, decode)
    by_sender = {(s, r) for s in range(prefill.size) for r in plan.receivers(s, n_pages)}
    by_receiver = {(s, r) for r in range(decode.size) for s in plan.senders(r, n_pages)}
    assert by_sender == by_receiver


def test_a_rank_that_owns_no_page_of_a_short_prompt_expects_no_page_sender():
    spec = make_spec("mm", HEADS)
    prefill, decode = sharding(2, tp=2), sharding(2, cp=4)
    found = [
        expected_senders(spec, prefill, decode, page_tokens=PAGE_TOKENS, prompt_len=5, rank=rank)
        for rank in range(4)
    ]
    assert found == [(0,), (1,), (), ()]


@pytest.mark.parametrize(
    ("prefill", "decode", "text"),
    [
        (sharding(4, cp=2), sharding(4), "prefill cp=2"),
        (sharding(4), sharding(4, tp=2, cp=5), "decode tp*cp=10"),
        (sharding(4, tp=5), sharding(4), "prefill tp*cp=5"),
        (sharding(4, tp=4), sharding(4, tp=2, cp=3), "prefill tp=4 and decode tp*cp=6"),
        (sharding(3), sharding(4), "prefill stage_bounds end at 3"),
    ],
)
def test_a_pair_that_does_not_divide_is_refused_with_the_reason(prefill, decode, text):
    with pytest.raises(LayoutMismatch, match=text.replace("*", r"\*")):
        check_pair(make_spec("kmkm", HEADS), prefill, decode)


def test_a_geometry_from_the_network_that_cannot_be_one_is_refused():
    broken = prefill_pb2.Geometry(
        pp=2, tp=1, cp=1, stage_bounds=[0, 4], n_pages=1, n_slots=1, slot_columns=1
    )
    with pytest.raises(LayoutMismatch, match="pp=2"):
        check_pair(make_spec("kmkm", HEADS), sharding(4), broken)
