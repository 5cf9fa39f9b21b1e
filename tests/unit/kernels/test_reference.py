"""Laws of the torch references: two forms of one operation agree, and nothing leaks out of bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from k3_kernels.api import BackendError, Backends, select
from k3_kernels.cpu import library
from k3_kernels.reference import conv, kda, lse, mla, moe
from k3_kernels.reference.tables import local_len
from torch import Tensor

from tests.compare import assert_close

seeds = st.integers(0, 2**31 - 1)
F64 = torch.float64


def _random(seed: int):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    return draw


def _kda(seed: int, n: int, heads: int = 2, dim: int = 8, decay: float = 1.0):
    draw = _random(seed)
    q, k = (kda.l2_normalize(draw(n, heads, dim), 1e-6) for _ in range(2))
    g = -decay * draw(n, heads, dim).abs()
    return q, k, draw(n, heads, dim), g, torch.sigmoid(draw(n, heads)), draw(heads, dim, dim)


@given(seeds, st.integers(1, 70), st.sampled_from([0.0, 0.1, 1.0, 30.0]))
def test_chunked_delta_rule_equals_the_recurrence(seed: int, n: int, decay: float) -> None:
    inputs = _kda(seed, n, decay=decay)
    o, state = kda.chunk(*inputs)
    expected_o, expected_state = kda.recurrent(*inputs)
    assert_close(o, expected_o, 1e-10, "o")
    assert_close(state, expected_state, 1e-10, "state")


@given(seeds, st.integers(1, 600), st.integers(1, 600))
def test_delta_rule_continues_across_chunks(seed: int, a: int, b: int) -> None:
    *tokens, state = _kda(seed, a + b, heads=1, dim=4)
    whole_o, whole_state = kda.chunk(*tokens, state)
    o1, state = kda.chunk(*(x[:a] for x in tokens), state)
    o2, state = kda.chunk(*(x[a:] for x in tokens), state)
    assert_close(torch.cat((o1, o2)), whole_o, 1e-10, "o")
    assert_close(state, whole_state, 1e-10, "state")


def test_chunked_delta_rule_is_finite_in_float32_under_the_strongest_decay() -> None:
    inputs = [x.float() for x in _kda(0, 64)]
    inputs[3] = torch.full_like(inputs[3], -5.0)
    o, state = kda.chunk(*inputs)
    expected_o, expected_state = kda.recurrent(*inputs)
    assert_close(o, expected_o, 1e-5, "o")
    assert_close(state, expected_state, 1e-5, "state")


@given(seeds, st.integers(1, 8), st.integers(1, 4))
def test_verify_from_any_column_equals_the_recurrence(seed: int, group: int, rows: int) -> None:
    heads, dim = 2, 4
    inputs = [_kda(seed + b, group, heads, dim) for b in range(rows)]
    states = torch.full((rows * group, heads, dim, dim), float("nan"), dtype=F64)
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    column = torch.tensor([(seed + b) % group for b in range(rows)])
    for b in range(rows):
        states[slots[b] * group + column[b]] = inputs[b][5]
    stacked = [torch.stack([x[i] for x in inputs]) for i in range(5)]
    o = kda.verify(*stacked, states, slots, column, group)
    for b in range(rows):
        for t in range(1, group + 1):
            expected_o, expected = kda.recurrent(*(x[:t] for x in inputs[b][:5]), inputs[b][5])
            assert_close(states[slots[b] * group + t - 1], expected, 1e-12, f"row {b} column {t}")
        assert_close(o[b], expected_o, 1e-12, f"row {b}")


@given(seeds, st.integers(1, 8), st.integers(1, 9))
def test_convolution_window_after_any_acceptance_equals_the_chunk(
    seed: int, group: int, n: int
) -> None:
    """Column a of window ++ tail continues exactly as if only the accepted tokens had come."""
    draw = _random(seed)
    weight, prompt, drafts, more = (
        draw(2, 3, 4, 4),
        draw(n, 2, 3, 4),
        draw(group, 2, 3, 4),
        draw(group, 2, 3, 4),
    )
    accepted = seed % group
    nan = float("nan")
    windows = torch.full((2, 2, 3, 4, 3), nan, dtype=F64)
    tails = torch.full((2, 2, 3, group - 1, 4), nan, dtype=F64)
    slots, zero = torch.tensor([1]), torch.tensor([0])
    _, windows[1] = conv.chunk(prompt, weight, torch.zeros(2, 3, 4, 3, dtype=F64))
    conv.verify(drafts[None], weight, windows, tails, slots, zero)
    y = conv.verify(more[None], weight, windows, tails, slots, torch.tensor([accepted]))
    kept = torch.cat((prompt, drafts[: accepted + 1], more))
    expected, _ = conv.chunk(kept, weight, torch.zeros(2, 3, 4, 3, dtype=F64))
    assert_close(y[0], expected[-group:], 1e-12, f"{accepted} of {group - 1} accepted")
    assert bool(windows[0].isnan().all()), "another slot was written"


def _cache(n_pages: int, page_tokens: int, width: int) -> Tensor:
    """One layer's strided view of a page-major pool with three layers, NaN where nothing is written."""
    pool = torch.full((n_pages, 3, page_tokens, width), float("nan"), dtype=F64)
    return pool[:, 1]


@given(seeds, st.integers(1, 33), st.sampled_from([1, 4, 16]))
def test_absorbed_attention_equals_the_expanded_form(seed: int, n: int, page_tokens: int) -> None:
    draw = _random(seed)
    heads, rank, shared, nope, value = 3, 6, 2, 5, 4
    kv_up, latent = draw(heads, nope + value, rank), draw(n, rank + shared)
    q = draw(n, heads, nope + shared)
    n_pages = -(-n // page_tokens)
    cache = _cache(n_pages + 2, page_tokens, rank + shared)
    table = torch.randperm(n_pages + 2, generator=torch.Generator().manual_seed(seed))[:n_pages]
    position = torch.arange(n)
    slot = table[position // page_tokens] * page_tokens + position % page_tokens
    mla.write(cache, slot, latent)
    scale = (nope + shared) ** -0.5
    expanded = mla.prefill(q, cache, table[None], (0, n), (0,), kv_up, scale)
    absorbed = torch.einsum("thn,hnc->thc", q[..., :nope], kv_up[:, :nope])
    bound = torch.arange(1, n + 1, dtype=torch.int32)
    plan = mla.plan_decode(table[None], bound, n, n, page_tokens)
    z, _ = mla.decode(torch.cat((absorbed, q[..., nope:]), -1), cache, plan, scale, rank)
    got = torch.einsum("thc,hvc->thv", z, kv_up[:, nope:])
    assert_close(got, expanded, 1e-10, "o")


@pytest.mark.parametrize("tile_values", [1, 50, 1 << 22])
def test_query_tiles_of_the_expanded_form_do_not_change_it(
    monkeypatch: pytest.MonkeyPatch, tile_values: int
) -> None:
    draw = _random(1)
    cache = _cache(3, 8, 6)
    mla.write(cache, torch.arange(17), draw(17, 6))
    arguments = (draw(12, 2, 5), cache, torch.arange(3)[None], (0, 12), (5,), draw(2, 7, 4), 0.4)
    expected = mla.prefill(*arguments)
    monkeypatch.setattr(mla, "SCORE_VALUES", tile_values)
    assert_close(mla.prefill(*arguments), expected, 1e-12, "o")


def test_rows_without_keys_give_zero_and_minus_infinity_beside_rows_that_have_some() -> None:
    draw = _random(2)
    cache = _cache(4, 4, 6)
    mla.write(cache, torch.tensor([0, 1, -1, 4]), draw(4, 6))
    bound = torch.tensor([0, 2, 0, 0, 1, 1], dtype=torch.int32)
    table = torch.tensor([[0, 3], [2, 3], [1, 3]])
    plan = mla.plan_decode(table, bound, 2, 2, 4)
    o, log_sum = mla.decode(draw(6, 3, 6), cache, plan, 0.5, 4)
    empty = bound == 0
    assert bool((o[empty] == 0).all())
    assert bool((log_sum[empty] == float("-inf")).all())
    assert bool(o[~empty].isfinite().all())
    assert bool(log_sum[~empty].isfinite().all())


def test_write_skips_slots_of_other_ranks() -> None:
    cache = _cache(2, 4, 3)
    mla.write(cache, torch.tensor([-1, 5, -1]), torch.ones(3, 3, dtype=F64))
    assert bool((cache[1, 1] == 1).all())
    assert int(cache.isnan().sum()) == 7 * 3


@given(seeds, st.integers(1, 5))
def test_merge_does_not_depend_on_the_order_of_partials(seed: int, ranks: int) -> None:
    draw = _random(seed)
    o, log_sum = draw(ranks, 3, 2, 4), draw(ranks, 3, 2) * 50
    log_sum[draw(ranks, 3, 2) > 0.5] = float("-inf")
    o[log_sum == float("-inf")] = float("nan")
    order = torch.randperm(ranks, generator=torch.Generator().manual_seed(seed))
    for got, expected in zip(
        lse.merge(o[order], log_sum[order]), lse.merge(o, log_sum), strict=True
    ):
        assert_close(got, expected, 1e-12, "merge")


def _experts(seed: int, n: int, top_k: int, n_experts: int = 6):
    draw = _random(seed)
    weights = moe.DenseExperts(0, draw(n_experts, 10, 4), draw(n_experts, 4, 5))
    ids = draw(n, n_experts).argsort(-1)[:, :top_k]
    return draw(n, 4), ids, torch.sigmoid(draw(n, top_k)), weights


@given(seeds, st.integers(1, 20), st.integers(1, 4))
def test_grouped_experts_equal_the_plain_sum_per_token(seed: int, n: int, top_k: int) -> None:
    z, ids, weight, weights = _experts(seed, n, top_k)
    got = moe.experts(z, ids, weight, weights, 4.0, 25.0)
    for t in range(n):
        expected = torch.zeros(4, dtype=F64)
        for e, w in zip(ids[t].tolist(), weight[t], strict=True):
            gate, up = (weights.w13(e) @ z[t]).chunk(2)
            up = torch.tanh(up / 25) * 25
            act = torch.tanh(gate / 4) * 4 * torch.sigmoid(gate) * up
            expected = expected + w * (weights.w2(e) @ act)
        assert_close(got[t], expected, 1e-10, f"token {t}")


def test_experts_of_two_ranks_add_up_to_those_of_one() -> None:
    z, ids, weight, whole = _experts(0, 9, 3)
    halves = [
        moe.DenseExperts(first, whole.w13_EFZ[first : first + 3], whole.w2_EZF[first : first + 3])
        for first in (0, 3)
    ]
    parts = [moe.experts(z, ids, weight, half, 4.0, None) for half in halves]
    assert_close(parts[0] + parts[1], moe.experts(z, ids, weight, whole, 4.0, None), 1e-12, "sum")


def test_a_rank_without_chosen_experts_contributes_zero() -> None:
    z, _, weight, whole = _experts(0, 5, 2)
    rank = moe.DenseExperts(6, whole.w13_EFZ, whole.w2_EZF)
    ids = torch.zeros(5, 2, dtype=torch.int64)
    assert bool((moe.experts(z, ids, weight, rank, 4.0, 25.0) == 0).all())


@given(st.integers(0, 10**6), st.sampled_from([1, 4, 64]), st.integers(1, 6))
def test_local_lengths_of_all_ranks_add_up_to_the_length(n: int, page: int, cp: int) -> None:
    length = torch.tensor([n])
    assert sum(int(local_len(length, page, cp, rank)) for rank in range(cp)) == n


@pytest.mark.parametrize("part", ["attention", "kda", "moe"])
def test_an_unknown_backend_is_refused_with_the_available_ones(part: str) -> None:
    with pytest.raises(BackendError, match=rf"backends\.{part}='cutlass'.*reference"):
        select(Backends(**{part: "cutlass"}), torch.device("cpu"))


def test_auto_is_resolved_to_a_concrete_name() -> None:
    name = "native" if library.is_built() else "reference"
    assert select(Backends(), torch.device("cpu")).chosen == Backends(name, name, name)


@given(seeds, st.integers(0, 40), st.integers(1, 40), st.sampled_from([(5, 3, 4), (2, 1, 9)]))
def test_attention_in_two_parts_equals_one_masked_softmax(
    seed: int, start: int, n: int, widths: tuple[int, int, int]
) -> None:
    nope, shared, value = widths
    draw = _random(seed)
    q, key = draw(3, n, nope + shared), draw(3, start + n, nope + shared)
    v = draw(3, start + n, value)
    expected = mla.causal(q, key, v, start, 0.3)
    o = mla.causal_in_parts(q, key, v, start, 0.3)
    assert_close(o, expected, 1e-12, "o")
