"""Neither how states are taken back nor how many drafts a step checks changes a token: real ranks, real scheduler.

Replay records against plain decoding at one and two context ranks; a gate that closes and opens at any step; widths
chosen by the drafter's confidence. Drafts are right often enough that groups end after none, some and all of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

from decode_svc.gate import GateRule, SpeculationGate
from decode_svc.rank.graphs import Eager, GraphRunner, PassThrough
from decode_svc.scheduler import Plan
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from k3.types import SamplingParams, TokenEvent
from tests.decode_group import Ask, DecodeGroup, Model
from tests.drafters import LocalEngine, random_drafter
from tests.model_runner import solo_stage
from tests.prefilled import Prefill

pytestmark = pytest.mark.dspark

NANO = Path(__file__).parents[1] / "golden" / "k3"
SPEC = K3Spec.from_folder(NANO)
LENGTHS = (1, 4, 7, 13, 21)
N_TOKENS = 14
LONGEST = max(LENGTHS) + N_TOKENS


class World(NamedTuple):
    """Prompts, what prefill sends of them, and their answers by plain decoding."""

    drafter: Path
    prompts: list[list[int]]
    sent: list[dict[str, Tensor]]
    params: list[SamplingParams]
    truth: list[list[int]]

    def asks(self, which: list[int]) -> list[Ask]:
        return [
            Ask(
                self.prompts[i],
                self.sent[i],
                TokenEvent(self.truth[i][0]),
                self.params[i],
                n_tokens=N_TOKENS - number % 3,
                leaves_after=4 if number % 4 == 1 else 0,
            )
            for number, i in enumerate(which)
        ]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    rng = random.Random(17)
    prompts = [[rng.randrange(SPEC.vocab_size) for _ in range(n)] for n in LENGTHS]
    params = [
        SamplingParams(temperature=0.0)
        if i % 2
        else SamplingParams(temperature=0.8, top_p=0.9, seed=40 + i)
        for i in range(len(prompts))
    ]
    plain = LocalEngine(solo_stage(NANO, "float64"), len(prompts), LONGEST)
    truth = [answer.ids for answer in plain.generate(prompts, N_TOKENS, params)]
    known = [pair for ids in truth for pair in pairwise(ids)]
    folder = tmp_path_factory.mktemp("drafter") / "mla"
    drafter = random_drafter(folder, SPEC, "mla", 11, follows=known)
    prefill = Prefill(NANO, drafter)
    return World(drafter, prompts, [prefill(prompt) for prompt in prompts], params, truth)


@pytest.fixture(scope="module")
def model(world: World) -> Model:
    return Model.open(NANO, Mesh(), world.drafter, confidence=True)


def expect_truth(world: World, group: DecodeGroup, which: list[int]) -> None:
    asks = world.asks(which)
    for i, ask, ids in zip(which, asks, group.play(asks), strict=True):
        assert ids == world.truth[i][: ask.n_tokens], f"prompt of {LENGTHS[i]} tokens"


WHICH = [0, 1, 2, 3, 4, 2, 3]


@pytest.mark.parametrize(
    ("mesh", "depth", "runner"),
    [
        (Mesh(), 1, Eager),
        (Mesh(), 2, lambda: PassThrough((1, 4))),
        (Mesh(cp=2), 2, Eager),
    ],
    ids=["cp1", "cp1-recorded-overlapped", "cp2-overlapped"],
)
def test_states_by_replay_give_the_tokens_of_plain_decoding(
    world: World, model: Model, mesh: Mesh, depth: int, runner: Callable[[], GraphRunner]
) -> None:
    if mesh.size > 1:
        model = Model.open(NANO, mesh, world.drafter)
    group = DecodeGroup(
        model,
        max_rows=4,
        max_len=LONGEST,
        depth=depth,
        runner=runner,
        more={"kda_rollback": "replay"},
    )
    assert group.storages[0].columns == 1
    expect_truth(world, group, WHICH)
    accepted = group.accepted()
    assert accepted[0], accepted
    assert accepted[7], accepted
    assert sum(accepted[1:7]), accepted


class Scripted(SpeculationGate):
    """Closed and open as a seed has it."""

    def __init__(self, seed: int) -> None:
        super().__init__(GateRule(1, 0.0, 1))
        self.rng = random.Random(seed)

    def decide(self, n_rows: int) -> bool:
        return self.rng.random() < 0.6


@pytest.mark.parametrize(
    ("depth", "rollback", "runner", "seed"),
    [
        (1, "replay", Eager, 1),
        (2, "snapshots", Eager, 2),
        (2, "replay", lambda: PassThrough((1, 4)), 3),
    ],
    ids=["apart-replay", "overlapped-snapshots", "recorded-replay"],
)
def test_a_gate_that_opens_and_closes_at_any_step_changes_no_token(
    world: World,
    model: Model,
    depth: int,
    rollback: str,
    runner: Callable[[], GraphRunner],
    seed: int,
) -> None:
    group = DecodeGroup(
        model,
        max_rows=4,
        max_len=LONGEST,
        depth=depth,
        runner=runner,
        more={"kda_rollback": rollback},
    )
    group.scheduler.policy.gate = Scripted(seed)
    plans = watched(group)
    expect_truth(world, group, WHICH)
    kinds = {(plan.group_len, plan.no_drafts) for plan in plans}
    assert kinds == {(8, False), (1, True), (1, False)}, f"seed {seed}: {kinds}"


def watched(group: DecodeGroup) -> list[Plan]:
    """Every plan of the group, as it is made."""
    plans: list[Plan] = []
    make = group.scheduler.plan

    def plan() -> Plan | None:
        made = make()
        if made is not None:
            plans.append(made)
        return made

    group.scheduler.plan = plan
    return plans


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_want_fewer_drafts_get_the_same_tokens(
    world: World, model: Model, depth: int
) -> None:
    wanted = [0, 3, None, 1, 0, 7, 2]
    group = DecodeGroup(model, max_rows=4, max_len=LONGEST, depth=depth)
    plans = watched(group)
    asks = [replace(a, draft_tokens=n) for a, n in zip(world.asks(WHICH), wanted, strict=True)]
    for i, ask, ids in zip(WHICH, asks, group.play(asks), strict=True):
        assert ids == world.truth[i][: ask.n_tokens], f"at most {ask.draft_tokens} drafts"
    given: dict[int | None, set[int]] = {n: set() for n in wanted}
    for step in (step for plan in plans for step in plan.rows):
        given[step.request.spec.draft_tokens].add(step.draft_len)
    most = {n: max(lengths) for n, lengths in given.items()}
    assert most == {0: 0, 1: 1, 2: 2, 3: 3, 7: 7, None: 7}


@pytest.mark.parametrize("depth", [1, 2])
def test_widths_by_confidence_change_no_token(
    world: World, model: Model, tmp_path: Path, depth: int
) -> None:
    rates = [100.0 / (1 + 0.02 * n) for n in range(1, 33)]
    document = {
        "drafter": "any",
        "temperatures": [1.0, *[8.0] * 6],
        "tokens": list(range(1, 33)),
        "steps_per_s": rates,
        "plain_rows": [1],
        "plain_steps_per_s": [100.0],
    }
    (tmp_path / "c.json").write_text(json.dumps(document))
    more = {"draft_schedule": "confidence", "calibration": str(tmp_path / "c.json")}
    group = DecodeGroup(model, max_rows=4, max_len=LONGEST, depth=depth, more=more)
    plans = watched(group)
    expect_truth(world, group, WHICH)
    widths = {plan.group_len for plan in plans}
    assert len(widths) > 2, f"always the same width: {widths}"
    assert not any(plan.no_drafts for plan in plans)


def test_confidence_of_an_answer_is_that_of_the_drafts_in_the_table(
    world: World, model: Model, tmp_path: Path
) -> None:
    rates = {"tokens": [1], "steps_per_s": [1.0], "plain_rows": [1], "plain_steps_per_s": [1.0]}
    document = {"drafter": "any", "temperatures": [1.0] * 7} | rates
    (tmp_path / "c.json").write_text(json.dumps(document))
    more = {"draft_schedule": "confidence", "calibration": str(tmp_path / "c.json")}
    group = DecodeGroup(model, max_rows=4, max_len=LONGEST, depth=1, more=more)
    requests = [group.submit(ask) for ask in world.asks([2, 0, 4])[::2]]
    group.step(requests)
    for request in requests:
        told = group.tables()[0].confidence_RK[request.held.row.index]
        assert list(request.confidence) == pytest.approx(told.tolist(), abs=1e-5)
        assert all(0 < c < 1 for c in request.confidence)
