"""Speculation never changes a token: every drafter, spread, overlap, runner, batch and rule against plain decoding.

One rank group per drafter and spread, in float64, without services: real ranks under the real scheduler. Drafts come
from drafters whose sequential heads know which token follows which in the answers, so groups end after none, some and
all of their drafts. Rows end, leave half-way and come back as another epoch while a plan that names them is on its way.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from decode_svc.rank.graphs import Eager, PassThrough
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from k3.types import SamplingParams, TokenEvent
from tests.decode_group import Ask, DecodeGroup, Model
from tests.drafters import LocalEngine, random_drafter
from tests.e2e.oracle import Oracle
from tests.model_runner import solo_stage
from tests.prefilled import Prefill

pytestmark = pytest.mark.dspark

NANO = Path(__file__).parents[1] / "golden" / "k3"
SPEC = K3Spec.from_folder(NANO)
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 21, 30)
N_KNOWN, N_TOKENS = 14, 7  # tokens of an answer that drafters learn from, and that are asked for
LONGEST = max(LENGTHS) + N_KNOWN
RUNNERS = {"eager": Eager, "graph": lambda: PassThrough((1, 13))}
DRAFTERS = {"mla": "prefix", "gqa": "mixture"}


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(SPEC.vocab_size) for _ in range(n)] for n in LENGTHS]


PROMPTS = prompts()
RULES: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(temperature=0.0)] * len(PROMPTS),
    "seeded": [
        SamplingParams(temperature=0.8, top_p=0.9, seed=100 + i) for i in range(len(PROMPTS))
    ],
}


@pytest.fixture(scope="module")
def truth() -> dict[str, list[list[int]]]:
    """Answers of plain decoding, each token checked against a forward without caches."""
    oracle, stage = Oracle(NANO), solo_stage(NANO, "float64")
    answers: dict[str, list[list[int]]] = {}
    for rule, params in RULES.items():
        plain = LocalEngine(stage, len(PROMPTS), LONGEST).generate(PROMPTS, N_KNOWN, params)
        answers[rule] = [answer.ids for answer in plain]
        for prompt, ids, how in zip(PROMPTS, answers[rule], params, strict=True):
            assert [event.id for event in oracle.redraw(prompt, ids, how)] == ids
    return answers


@pytest.fixture(scope="module")
def drafter(truth, tmp_path_factory) -> Callable[[str], Path | None]:
    """Drafter folders by flavour."""
    known = [pair for answers in truth.values() for ids in answers for pair in pairwise(ids)]

    @cache
    def folder(flavour: str) -> Path | None:
        if flavour == "off":
            return None
        path = tmp_path_factory.mktemp("drafter") / flavour
        return random_drafter(path, SPEC, flavour, 11, DRAFTERS[flavour], follows=known)

    return folder


@pytest.fixture(scope="module")
def sent(drafter):
    """What prefill sends of every prompt, by flavour."""

    @cache
    def compute(flavour: str):
        prefill = Prefill(NANO, drafter(flavour))
        return [prefill(prompt) for prompt in PROMPTS]

    return compute


@pytest.fixture(scope="module", params=["off", "mla", "gqa"])
def flavour(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda cp: f"cp{cp}")
def model(request, flavour, drafter) -> Model:
    return Model.open(NANO, Mesh(cp=request.param), drafter(flavour))


@pytest.mark.parametrize("depth", [1, 2], ids=["apart", "overlapped"])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("batch", [1, 13])
@pytest.mark.parametrize("rule", RULES)
def test_tokens_are_those_of_plain_decoding(
    model, flavour, sent, truth, depth, runner, batch, rule
):
    group = DecodeGroup(
        model,
        max_rows=batch,
        max_len=LONGEST,
        depth=depth,
        runner=RUNNERS[runner],
        warms_up=False,
        draft_tokens=7 if flavour != "off" else 0,
    )
    which = [*range(13), 3, 8] if batch == 13 else [12]
    asks = [
        Ask(
            PROMPTS[i],
            sent(flavour)[i],
            TokenEvent(truth[rule][i][0]),
            RULES[rule][i],
            n_tokens=N_TOKENS - number % 3,
            leaves_after=2 if number % 5 == 0 else 0,
        )
        for number, i in enumerate(which)
    ]
    answers = group.play(asks)
    for i, ask, ids in zip(which, asks, answers, strict=True):
        assert ids == truth[rule][i][: ask.n_tokens], f"prompt of {LENGTHS[i]} tokens"
    if flavour != "off" and batch == 13:
        accepted = group.accepted()
        assert min(accepted[0], sum(accepted[1:7]), accepted[7]) > 0, f"too easy: {accepted}"
