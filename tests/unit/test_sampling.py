"""Drawing: generator, filters, penalties, bans, acceptance, log probabilities."""

import math
from dataclasses import replace

import pytest
import torch

from decode_svc.rank.grammar import pack
from k3.acceptance import accept
from k3.edits import EditTables, TokenCounts, mask_words, unpack_mask
from k3.sampling import (
    Flavour,
    Params,
    Purpose,
    Recipe,
    RowSampling,
    philox,
    pick,
    sample,
    uniform,
    with_logprobs,
)
from k3.types import LogprobParams, SamplingParams

V = 37
GREEDY = SamplingParams(temperature=0.0)


def logits(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, V, generator=generator, dtype=torch.float64).to(dtype) * 2


def draw_rows(
    rows: list[RowSampling], values: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One token per row of logits, each its own request."""
    recipe, where = Recipe.of(rows, vocab_size=V), positions[:, None]
    return recipe.draw(recipe.scores(values[:, None], where), where)[:, 0]


def draw(
    row: torch.Tensor, params: SamplingParams, positions: range, **kwargs: object
) -> list[int]:
    """One token per position from the same logits."""
    rows = [RowSampling(params, **kwargs)] * len(positions)  # type: ignore[arg-type]
    return draw_rows(rows, row.expand(len(rows), -1), torch.tensor(list(positions))).tolist()


def expected_counts(probs: torch.Tensor, n: int, tokens: list[int]) -> None:
    """Chi-square of the drawn counts against `probs`, at five sigma of its own distribution."""
    counts = torch.bincount(torch.tensor(tokens), minlength=V).double()
    assert counts[probs == 0].sum() == 0, "a filtered token was drawn"
    live = probs > 0
    chi2 = ((counts - n * probs)[live] ** 2 / (n * probs[live])).sum().item()
    freedom = int(live.sum()) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5, (chi2, freedom)


# ------------------------------------------------------------------ generator


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], words: str) -> None:
    found = philox([torch.tensor([c]) for c in counter], [torch.tensor([k]) for k in key])
    assert " ".join(f"{int(word):08x}" for word in found) == words


def test_uniforms_lie_in_the_half_open_unit_interval_and_fill_it() -> None:
    n = 20_000
    position = torch.arange(n)
    u = uniform(torch.full((n,), 7), torch.zeros(n, dtype=torch.int64), position, Purpose.TARGET)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * n)
    lag = ((u[1:] - 0.5) * (u[:-1] - 0.5)).mean() * 12
    assert abs(lag) < 5 / math.sqrt(n)


def test_every_part_of_the_key_changes_the_number() -> None:
    one = torch.tensor([5])
    base = uniform(one, one, one, Purpose.TARGET)
    others = [
        uniform(one + 1, one, one, Purpose.TARGET),
        uniform(one + (1 << 40), one, one, Purpose.TARGET),
        uniform(one, one + 1, one, Purpose.TARGET),
        uniform(one, one, one + 1, Purpose.TARGET),
        uniform(one, one, one, Purpose.DRAFT),
        uniform(-one, one, one, Purpose.TARGET),
        uniform(one, one, one, Purpose.TARGET, one),
        uniform(one, one, one, Purpose.DRAFT, one),
        uniform(one, one, one, Purpose.DRAFT, one + 1),
    ]
    assert len({float(u) for u in (base, *others)}) == 10


# ------------------------------------------------------------------ independence


def test_a_row_draws_the_same_token_in_every_batch() -> None:
    params = [
        GREEDY,
        SamplingParams(seed=3),
        SamplingParams(seed=3, sample_index=1),
        SamplingParams(seed=9, top_k=5, top_p=0.8),
        SamplingParams(seed=11, min_p=0.2, temperature=0.7),
    ]
    rows = [RowSampling(p) for p in params]
    values, positions = logits(5), torch.tensor([3, 3, 3, 900, 4])
    together = draw_rows(rows, values, positions).tolist()
    for i in (4, 2, 0, 1, 3):
        alone = draw_rows([rows[i]], values[i : i + 1], positions[i : i + 1]).tolist()
        assert alone == [together[i]]
    order = [2, 0, 4, 3, 1]
    mixed = draw_rows([rows[i] for i in order], values[order], positions[order]).tolist()
    assert mixed == [together[i] for i in order]


@pytest.mark.dspark
def test_a_group_draws_what_single_steps_would() -> None:
    """Speculation changes nothing: row j of a group uses the number of its own position."""
    row, values = RowSampling(SamplingParams(seed=5, top_p=0.9)), logits(4, seed=2)
    positions = torch.arange(10, 14)
    recipe = Recipe.of([row], vocab_size=V)
    grouped = recipe.draw(values[None], positions[None])
    singly = [draw_rows([row], values[i : i + 1], positions[i : i + 1]).item() for i in range(4)]
    assert grouped.tolist() == [singly]


def test_greedy_takes_the_lowest_id_on_ties_and_ignores_filters() -> None:
    values = torch.zeros(1, V)
    values[0, [8, 21]] = 3.0
    params = SamplingParams(temperature=0.0, top_p=0.01, top_k=1, min_p=1.0)
    assert draw(values, params, range(5)) == [8] * 5


# ------------------------------------------------------------------ distributions

N = 12_000


def test_plain_sampling_follows_softmax() -> None:
    values = logits(1, seed=4)
    tokens = draw(values, SamplingParams(seed=1, temperature=1.5), range(N))
    expected_counts((values[0].double() / 1.5).softmax(-1), N, tokens)


def test_top_k_keeps_ties_of_the_kth_value() -> None:
    values = logits(1, seed=5)
    order = values[0].argsort(descending=True)
    values[0, order[3]] = values[0, order[2]]  # third and fourth are equal: both stay
    tokens = draw(values, SamplingParams(seed=2, top_k=3), range(N))
    probs = torch.zeros(V, dtype=torch.float64)
    probs[order[:4]] = values[0, order[:4]].double().softmax(-1)
    expected_counts(probs, N, tokens)


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    probs = torch.full((V,), 1e-9, dtype=torch.float64)
    probs[[3, 30, 12]] = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    values = probs.log()[None]
    kept = set(draw(values, SamplingParams(seed=3, top_p=0.6), range(2000)))
    assert kept == {3, 30}
    assert set(draw(values, SamplingParams(seed=3, top_p=0.49), range(2000))) == {3}


def test_top_p_takes_equal_tokens_in_order_of_their_ids() -> None:
    values = torch.zeros(1, V)  # all equal: the first ones whose preceding mass is below 0.2
    kept = set(draw(values, SamplingParams(seed=3, top_p=0.2), range(4000)))
    assert kept == set(range(math.ceil(0.2 * V)))


def test_top_p_of_one_keeps_every_token() -> None:
    values = torch.zeros(1, V)
    mixed = [RowSampling(SamplingParams(seed=i, top_p=p)) for i, p in [(1, 0.5), (2, 1.0)]]
    seen = {
        int(draw_rows(mixed, values.expand(2, -1), torch.tensor([p, p]))[1]) for p in range(1500)
    }
    assert seen == set(range(V))


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    probs = torch.full((V,), 0.001, dtype=torch.float64)
    probs[[1, 2, 4]] = torch.tensor([0.5, 0.26, 0.2], dtype=torch.float64)
    kept = set(draw(probs.log()[None], SamplingParams(seed=4, min_p=0.5), range(3000)))
    assert kept == {1, 2}


def test_extreme_logits_draw_a_real_token() -> None:
    values = torch.full((1, V), float("-inf"))
    values[0, 17] = 1e4
    assert set(draw(values, SamplingParams(seed=1), range(50))) == {17}
    low = SamplingParams(seed=1, temperature=2e-5)
    assert set(draw(logits(1, seed=3), low, range(50))) == {int(logits(1, seed=3).argmax())}


# ------------------------------------------------------------------ edits


def test_logit_bias_is_added_before_anything_else() -> None:
    best = int(logits(1).argmax())
    params = replace(GREEDY, logit_bias={best: -100.0, 5: 90.0})
    assert draw(logits(1), params, range(1)) == [5]


def test_edits_leave_the_logits_alone() -> None:
    values = logits(1)
    before = values.clone()
    draw(values, replace(GREEDY, logit_bias={0: 50.0}), range(1))
    assert torch.equal(values, before)


def test_end_ids_are_banned_until_min_tokens_exist() -> None:
    values = torch.zeros(1, V)
    values[0, 6] = 9.0
    params = replace(GREEDY, min_tokens=3)
    tokens = draw(values, params, range(20, 26), end_ids=(6,), output_start=20)
    assert tokens == [0, 0, 0, 6, 6, 6]


def test_penalties_follow_their_definitions() -> None:
    values = torch.tensor([[2.0, 1.0, -1.0, 0.5]], dtype=torch.float64)
    params = SamplingParams(
        temperature=0.0, presence_penalty=0.25, frequency_penalty=0.5, repetition_penalty=2.0
    )
    counts = TokenCounts(4, prompt_ids=[2], output_ids=[0, 0])
    recipe = Recipe.of([RowSampling(params)], [counts], vocab_size=4)
    scores = recipe.scores(values[None], torch.tensor([[9]]))
    assert scores[0, 0].tolist() == [2.0 / 2 - 2 * 0.5 - 0.25, 1.0, -1.0 * 2, 0.5]
    [event] = sample(values, [RowSampling(params)], [9], [counts])
    assert event.id == 1


def test_penalties_without_counts_are_a_bug_that_shows() -> None:
    row = RowSampling(SamplingParams(presence_penalty=1.0))
    with pytest.raises(ValueError, match="no token counts"):
        sample(logits(1), [row], [1], [None])


@pytest.mark.dspark
def test_a_group_is_edited_as_its_tokens_would_be_one_by_one() -> None:
    """Row j sees the drafts before it as generated; a request without edits in the batch is left bit for bit alone."""
    params = SamplingParams(
        presence_penalty=0.3,
        frequency_penalty=0.7,
        repetition_penalty=1.4,
        logit_bias={3: 1.5},
        min_tokens=3,
    )
    rows = [RowSampling(params, (6, 9), output_start=20), RowSampling(GREEDY)]
    values = logits(10, seed=6, dtype=torch.float64).view(2, 5, V)
    drafts, positions = torch.tensor([[4, 4, 2, 6], [1, 2, 3, 4]]), torch.arange(21, 26)
    tables = EditTables(2, V, torch.device("cpu"))
    tables.put(
        0, params, (6, 9), rows[0].banned_before, TokenCounts(V, prompt_ids=[2], output_ids=[5])
    )
    tables.put(1, GREEDY, (), 0, None)
    edits = tables.select(torch.tensor([0, 1]), bias=True, ban=True, counts=True)
    recipe = Recipe(Params.of(rows, "cpu"), Flavour.of(rows), edits)
    grouped = recipe.scores(values, positions.expand(2, -1), drafts)
    for j in range(5):
        seen = TokenCounts(V, prompt_ids=[2], output_ids=[5, *drafts[0, :j].tolist()])
        alone = Recipe.of(rows[:1], [seen], vocab_size=V)
        expected = alone.scores(values[:1, j : j + 1], positions[None, j : j + 1])
        assert torch.equal(grouped[0, j], expected[0, 0]), j
    assert torch.equal(grouped[1], values[1])
    assert grouped[0, :2, 6].tolist() == [float("-inf")] * 2
    assert grouped[0, 2:, 6].isfinite().all()


def test_counted_tokens_are_the_emitted_ones() -> None:
    tables = EditTables(3, V, torch.device("cpu"))
    emitted = torch.tensor([[4, 4, 7], [4, 1, 1]])
    is_emitted = torch.tensor([[True, True, False], [True, False, False]])
    tables.count(torch.tensor([2, 1]), emitted, is_emitted)
    assert tables.generated_RV[2].nonzero().flatten().tolist() == [4]
    assert int(tables.generated_RV[2, 4]) == 2
    assert int(tables.generated_RV[1, 4]) == int(tables.generated_RV[1].sum()) == 1
    assert not tables.generated_RV[0].any()


def test_masks_survive_packing() -> None:
    generator = torch.Generator().manual_seed(1)
    for v in (31, 32, 33, 97):
        wanted = torch.rand(v, generator=generator) < 0.4
        wanted[-1] = True
        words = pack(wanted.nonzero().flatten().tolist(), mask_words(v))
        assert torch.equal(unpack_mask(words, v), wanted), v


# ------------------------------------------------------------------ distributions for acceptance


def test_probabilities_are_what_is_drawn_from() -> None:
    rows = [
        RowSampling(SamplingParams(seed=1, temperature=0.6, top_k=9, top_p=0.8, min_p=0.05)),
        RowSampling(GREEDY),
    ]
    values = logits(2, seed=8)[:, None]
    recipe = Recipe.of(rows, vocab_size=V)
    p = recipe.probabilities(values)
    assert p.sum(-1).flatten().tolist() == pytest.approx([1.0, 1.0], abs=1e-12)
    assert p[1, 0, values[1, 0].argmax()] == 1.0
    expected_counts(p[0, 0], N, draw(values[0], rows[0].params, range(N)))
    positions = torch.arange(N)[None]
    drawn = pick(
        p[:1].expand(N, -1, -1)[:, 0],
        recipe.params.uniform(positions.expand(2, -1), Purpose.RESIDUAL)[0],
    )
    expected_counts(p[0, 0], N, drawn.tolist())


# ------------------------------------------------------------------ acceptance


@pytest.mark.dspark
@pytest.mark.parametrize(
    ("drawn", "drafts", "n_drafts", "accepted"),
    [
        ([5, 6, 7, 8], [5, 6, 7], 3, 3),
        ([5, 6, 7, 8], [5, 9, 7], 3, 1),
        ([5, 6, 7, 8], [4, 6, 7], 3, 0),
        ([5, 6, 7, 8], [5, 6, 7], 2, 2),
        ([5, 6, 7, 8], [5, 6, 7], 0, 0),
    ],
)
def test_drafts_are_accepted_while_they_match(
    drawn: list[int], drafts: list[int], n_drafts: int, accepted: int
) -> None:
    found = accept(torch.tensor([drawn]), torch.tensor([drafts]), torch.tensor([n_drafts]))
    assert found.tolist() == [accepted]


@pytest.mark.dspark
def test_without_drafts_nothing_is_accepted() -> None:
    empty = torch.zeros(3, 0, dtype=torch.int64)
    assert accept(torch.ones(3, 1), empty, torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]


# ------------------------------------------------------------------ log probabilities


def test_logprobs_are_the_raw_log_softmax_whatever_was_edited() -> None:
    values = logits(2)
    params = SamplingParams(seed=8, temperature=0.5, logit_bias={4: 60.0}, top_k=1)
    rows = [RowSampling(params, logprobs=LogprobParams(True, 3)), RowSampling(GREEDY)]
    first, second = sample(values, rows, [5, 5])
    raw = values.log_softmax(-1)
    assert first.id == 4
    assert first.logprob == pytest.approx(raw[0, 4].item(), abs=1e-6)
    best = raw[0].topk(3)
    assert [i for i, _ in first.top] == best.indices.tolist()
    assert [p for _, p in first.top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert second == (int(values[1].argmax()), None, ())


def test_low_precision_logits_give_float32_logprobs() -> None:
    values = logits(1, dtype=torch.bfloat16)
    [event] = with_logprobs(values, [3], 0)
    assert event.logprob == pytest.approx(values.float().log_softmax(-1)[0, 3].item(), abs=1e-6)
    assert event.top == ()


def test_nothing_to_draw_is_no_work() -> None:
    assert sample(logits(0), [], []) == []
    assert with_logprobs(logits(0), [], 3) == []
