"""Decode over pipeline stages: tokens and acceptance are those of one stage, whatever the drafts.

Real ranks on threads under the service's own scheduler and wire, several requests, so that every stage has plans of
its own rows in flight. Drafters whose sequential heads know the answers end groups after none, some and all drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from decode_svc.rank.graphs import PassThrough
from decode_svc.rank.loop import Launched
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from k3.types import SamplingParams, TokenEvent
from k3.v1 import plan_pb2
from tests.decode_group import Ask, DecodeGroup, Model
from tests.drafters import LocalEngine, random_drafter
from tests.e2e.oracle import Oracle
from tests.model_runner import solo_stage
from tests.prefilled import Prefill

pytestmark = pytest.mark.prefill

NANO = Path(__file__).parents[1] / "golden" / "k3"
SPEC = K3Spec.from_folder(NANO)
LENGTHS = (1, 3, 4, 5, 8, 13, 30)
N_TOKENS = 12
LONGEST = max(LENGTHS) + N_TOKENS
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, seed=100),
    SamplingParams(temperature=0.0, presence_penalty=0.7, repetition_penalty=1.2),
)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(SPEC.vocab_size) for _ in range(n)] for n in LENGTHS]


PROMPTS = prompts()
HOW = [PARAMS[i % len(PARAMS)] for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    """Answers of plain decoding, each token checked against a forward without caches."""
    oracle, stage = Oracle(NANO), solo_stage(NANO, "float64")
    plain = LocalEngine(stage, len(PROMPTS), LONGEST).generate(PROMPTS, N_TOKENS, HOW)
    answers = [answer.ids for answer in plain]
    for prompt, ids, how in zip(PROMPTS, answers, HOW, strict=True):
        assert [event.id for event in oracle.redraw(prompt, ids, how)] == ids
    return answers


@pytest.fixture(scope="module", params=["off", "mla", "gqa"])
def drafter(request, truth, tmp_path_factory) -> Path | None:
    if request.param == "off":
        return None
    stream = {"mla": "mixture", "gqa": "prefix"}[request.param]
    known = [pair for ids in truth for pair in pairwise(ids)]
    folder = tmp_path_factory.mktemp("drafter") / request.param
    return random_drafter(folder, SPEC, request.param, 11, stream, follows=known)


@pytest.fixture(scope="module")
def asks(drafter, truth) -> list[Ask]:
    prefill = Prefill(NANO, drafter)
    return [
        Ask(
            PROMPTS[i],
            prefill(PROMPTS[i]),
            TokenEvent(truth[i][0]),
            HOW[i],
            n_tokens=N_TOKENS - i % 4,
            leaves_after=3 if i % 5 == 0 else 0,
        )
        for i in range(len(PROMPTS))
    ]


Spoil = Callable[[plan_pb2.RowState], None]


class Spoilt(DecodeGroup):
    """The first stage is told something else than the last one."""

    spoil: Spoil

    def _launch(self, plan: plan_pb2.StepPlan) -> Launched:
        other = plan_pb2.StepPlan()
        other.CopyFrom(plan)
        for row in other.verify_rows:
            self.spoil(row.state)
        return self._launch_each([other, *[plan] * (len(self.ranks) - 1)])


def keep_rejected(state: plan_pb2.RowState) -> None:
    """Counts that do not reach the stage: its recurrent state is that after all drafts."""
    state.read_column = len(state.draft_ids) if state.read_column >= 0 else -1


def forget_drafts(state: plan_pb2.RowState) -> None:
    state.draft_ids[:] = [0] * len(state.draft_ids)


def lag_behind(state: plan_pb2.RowState) -> None:
    """A base that counts the newest tokens later, as deferred output would have it."""
    state.base -= max(0, state.read_column)


@pytest.mark.dspark
@pytest.mark.parametrize("spoil", [keep_rejected, forget_drafts, lag_behind])
def test_a_stage_without_counts_drafts_or_base_of_the_last_one_shows(
    spoil: Spoil, truth, tmp_path
) -> None:
    """What must fail does: every part of a row's state is needed on every stage."""
    known = [pair for ids in truth for pair in pairwise(ids)]
    drafter = random_drafter(tmp_path, SPEC, "mla", 11, "prefix", follows=known)
    prefill = Prefill(NANO, drafter)
    asks = [
        Ask(PROMPTS[i], prefill(PROMPTS[i]), TokenEvent(truth[i][0]), HOW[i], N_TOKENS)
        for i in range(len(PROMPTS))
    ]
    group = Spoilt(Model.open(NANO, Mesh(2), drafter), max_rows=5, max_len=LONGEST, depth=2)
    group.spoil = spoil
    assert group.play(asks) != [ids[:N_TOKENS] for ids in truth]


def play(mesh: Mesh, drafter: Path | None, asks: list[Ask], max_rows: int) -> DecodeGroup:
    return DecodeGroup(
        Model.open(NANO, mesh, drafter),
        max_rows=max_rows,
        max_len=LONGEST,
        depth=2,
        draft_tokens=7 if drafter is not None else 0,
    )


@pytest.mark.parametrize(
    ("mesh", "max_rows"), [(Mesh(2), 5), (Mesh(2, 2), 2), (Mesh(2), 1)], ids=str
)
def test_tokens_are_those_of_plain_decoding(mesh, max_rows, drafter, asks, truth) -> None:
    group = play(mesh, drafter, asks, max_rows)
    for i, (ask, ids) in enumerate(zip(asks, group.play(asks), strict=True)):
        assert ids == truth[i][: ask.n_tokens], f"prompt of {LENGTHS[i]} tokens"


def test_steps_over_stages_are_not_recorded() -> None:
    """A frame lies elsewhere each time; the rank says so before its first step."""
    with pytest.raises(ValueError, match="cannot be recorded"):
        DecodeGroup(
            Model.open(NANO, Mesh(2)),
            max_rows=1,
            max_len=LONGEST,
            depth=1,
            draft_tokens=0,
            runner=PassThrough,
        )


@pytest.mark.dspark
@pytest.mark.parametrize("drafter", ["mla", "gqa"], indirect=True)
def test_drafts_are_accepted_as_often_as_on_one_stage(drafter, asks) -> None:
    """Nobody leaves here, so both run the same groups; the first drafts come from the rows prefill handed over."""
    staying = [ask for ask in asks if not ask.leaves_after]
    groups = [play(mesh, drafter, staying, 5) for mesh in (Mesh(), Mesh(2))]
    answers = [group.play(staying) for group in groups]
    assert answers[0] == answers[1]
    accepted = [group.accepted() for group in groups]
    assert accepted[0] == accepted[1]
    assert sum(n > 0 for n in accepted[0]) > 2, f"too easy: {accepted}"
