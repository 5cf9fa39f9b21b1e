"""Speculation through the row table gives the tokens of plain decoding, whatever the drafts are worth (float64)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from k3.model.dspark_spec import DraftSpec
from k3.model.spec import K3Spec
from k3.types import LogprobParams, SamplingParams
from tests.compare import assert_close
from tests.drafters import LocalEngine, random_drafter
from tests.model_runner import solo_stage

pytestmark = pytest.mark.dspark

NANO = Path(__file__).parents[3] / "golden" / "k3"
SPEC = K3Spec.from_folder(NANO)
N_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0)


def prompts(n: int) -> list[list[int]]:
    rng = random.Random(5)
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 21, 30]
    return [[rng.randrange(SPEC.vocab_size) for _ in range(m)] for m in lengths[:n]]


def seeded(n: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=0.8, top_p=0.9, seed=100 + i) for i in range(n)]


@pytest.fixture(scope="module")
def plain_stage():
    return solo_stage(NANO, "float64")


@pytest.fixture(scope="module", params=["mla-prefix", "mla-mixture", "gqa-mixture"])
def kind(request, tmp_path_factory):
    """Drafter folder and a stage that captures its taps."""
    flavour, stream = request.param.split("-")
    folder = random_drafter(
        tmp_path_factory.mktemp("drafter") / request.param, SPEC, flavour, 11, stream
    )
    spec = DraftSpec.from_folder(folder)
    return folder, solo_stage(NANO, "float64", taps=spec.taps, tap_stream=stream)


@pytest.mark.parametrize("n", [1, 13])
@pytest.mark.parametrize("how", ["greedy", "seeded"])
def test_tokens_are_those_of_plain_decoding(plain_stage, kind, n, how):
    folder, stage = kind
    params = [GREEDY] * n if how == "greedy" else seeded(n)
    plain = LocalEngine(plain_stage, n, 64).generate(prompts(n), N_TOKENS, params)
    engine = LocalEngine(
        stage, n, 64, drafter=folder, draft_tokens=7, window=16, buckets=(1, 4, 16)
    )
    answers = engine.generate(prompts(n), N_TOKENS, params)
    assert [a.ids for a in answers] == [a.ids for a in plain]


def test_fewer_drafts_than_the_block_are_its_first_ones(kind):
    folder, stage = kind
    whole = LocalEngine(stage, 1, 64, drafter=folder, draft_tokens=7)
    part = LocalEngine(stage, 1, 64, drafter=folder, draft_tokens=3)
    for engine in (whole, part):
        engine.generate(prompts(1), 2, [GREEDY])
    assert part.table.drafts_RK.shape[1] == 3
    assert part.table.drafts_RK[1].tolist() == whole.table.drafts_RK[1, :3].tolist()


def test_drafts_do_not_depend_on_the_batch(kind):
    """Slots are never shared: each of 13 requests is proposed what it is proposed alone."""
    folder, stage = kind
    together = LocalEngine(stage, 13, 64, drafter=folder, draft_tokens=7, window=16)
    answers = together.generate(prompts(13), 12, seeded(13))
    for i in (0, 4, 12):
        alone = LocalEngine(stage, 1, 64, drafter=folder, draft_tokens=7, window=16)
        [answer] = alone.generate([prompts(13)[i]], 12, [seeded(13)[i]])
        assert answer.ids == answers[i].ids
        assert answer.accepted == answers[i].accepted
        assert alone.table.drafts_RK[1].tolist() == together.table.drafts_RK[i + 1].tolist()


def test_a_cold_request_gives_the_same_tokens(plain_stage, kind):
    folder, stage = kind
    plain = LocalEngine(plain_stage, 5, 64).generate(prompts(5), N_TOKENS, seeded(5))
    engine = LocalEngine(stage, 5, 64, drafter=folder, draft_tokens=7, window=16)
    answers = engine.generate(prompts(5), N_TOKENS, seeded(5), hand_over=False)
    assert [a.ids for a in answers] == [a.ids for a in plain]


def test_requests_with_penalties_speculate_and_get_their_plain_tokens(plain_stage, kind):
    folder, stage = kind
    params = [
        GREEDY,
        SamplingParams(temperature=0.9, seed=3, presence_penalty=0.7, repetition_penalty=1.2),
    ]
    plain = LocalEngine(plain_stage, 2, 64).generate(prompts(2), N_TOKENS, params)
    engine = LocalEngine(stage, 2, 64, drafter=folder, draft_tokens=7, window=16)
    answers = engine.generate(prompts(2), N_TOKENS, params)
    assert [a.ids for a in answers] == [a.ids for a in plain]


def test_rows_of_one_batch_check_different_numbers_of_drafts(plain_stage):
    """0 to 7 right drafts beside each other: tokens and log probabilities are the plain ones, all drafts are kept."""
    n, wanted = 8, LogprobParams(True, 2)
    kinds = [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, seed=7),
        SamplingParams(temperature=0.9, top_k=30, seed=3, frequency_penalty=0.7),
    ]
    params = [kinds[i % 3] for i in range(n)]
    plain = LocalEngine(plain_stage, n, 64).generate(prompts(n), 11, params, logprobs=wanted)
    engine = LocalEngine(plain_stage, n, 64, draft_tokens=7)
    answers = engine.generate(prompts(n), 1, params, logprobs=wanted)
    for limits in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]):
        for i, answer in enumerate(answers):
            right = plain[i].ids[len(answer.ids) :][:7]
            drafts = [*right, *[1] * (7 - len(right))]
            engine.table.drafts_RK[i + 1] = torch.tensor(drafts)
        found = engine.step.launch(range(1, n + 1), 50, limits).answers()
        assert [len(events) - 1 for events in found] == limits
        for answer, events in zip(answers, found, strict=True):
            answer.events += events
    for answer, expected in zip(answers, plain, strict=True):
        assert answer.ids == expected.ids[: len(answer.ids)]
        for a, b in zip(answer.events, expected.events, strict=False):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-9)
            assert [i for i, _ in a.top] == [i for i, _ in b.top]


def test_log_probabilities_are_those_of_plain_decoding(plain_stage, kind):
    folder, stage = kind
    wanted = LogprobParams(True, 3)
    plain = LocalEngine(plain_stage, 3, 64).generate(prompts(3), 12, seeded(3), logprobs=wanted)
    engine = LocalEngine(stage, 3, 64, drafter=folder, draft_tokens=7, window=16)
    answers = engine.generate(prompts(3), 12, seeded(3), logprobs=wanted)
    for a, b in zip(answers, plain, strict=True):
        assert [e.logprob for e in a.events] == pytest.approx(
            [e.logprob for e in b.events], abs=1e-9
        )


def test_content_of_rejected_drafts_reaches_nothing_past_the_wrap_of_the_ring(kind):
    """Two runs whose rejected drafts differ leave the same rows and the same next drafts."""
    folder, stage = kind
    seen: list[tuple[list[int], torch.Tensor]] = []
    for noise in (0, 1):
        engine = LocalEngine(stage, 1, 64, drafter=folder, draft_tokens=7, window=8)
        [place] = engine.pools.requests[:1]
        answers = engine.generate([prompts(13)[12]], 20, [GREEDY])
        ids = answers[0].ids
        engine.table.drafts_RK[1] = torch.full((7,), 3 + noise)  # almost surely wrong drafts
        engine.step.launch([1], engine.room - 8).answers()
        assert engine.ring is not None
        own = engine.ring.pool.unflatten(0, (-1, engine.ring.places))[place.slot]
        seen.append((ids + engine.table.drafts_RK[1].tolist(), own.clone()))
    assert seen[0][0] == seen[1][0]
    assert_close(seen[0][1], seen[1][1], 1e-12, "rows")  # experts see other batch sizes
