"""Under the rules that weigh drafts tokens depend on the drafts, and on nothing else: spread, overlap, runner, batch.

Real ranks under the real scheduler, in float64. What one rank draws alone, step by step, is drawn by two ranks that
share the positions, with two recorded steps in flight and everybody in one batch.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from decode_svc.rank.graphs import Eager, PassThrough
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from k3.types import SamplingParams, TokenEvent
from tests.decode_group import Ask, DecodeGroup, Model
from tests.drafters import random_drafter
from tests.prefilled import Prefill

pytestmark = pytest.mark.dspark

NANO = Path(__file__).parents[1] / "golden" / "k3"
SPEC = K3Spec.from_folder(NANO)
N_TOKENS = 9
# high temperatures bring target and random drafter close to each other: drafts are kept and dropped everywhere
PARAMS = [
    SamplingParams(temperature=4.0, seed=1),
    SamplingParams(temperature=3.0, top_k=400, seed=2, presence_penalty=0.5),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=5.0, top_p=0.99, seed=3),
]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_drafter(tmp_path_factory.mktemp("d") / "d", SPEC, "gqa", 5, "mixture", block=3)


@pytest.fixture(scope="module")
def asks(drafter: Path) -> list[Ask]:
    rng, prefill = random.Random(8), Prefill(NANO, drafter)
    prompts = [[rng.randrange(SPEC.vocab_size) for _ in range(n)] for n in (3, 9, 1, 6)]
    return [
        Ask(prompt, prefill(prompt), TokenEvent(5), how, n_tokens=N_TOKENS)
        for prompt, how in zip(prompts, PARAMS, strict=True)
    ]


@pytest.fixture(scope="module")
def models(drafter: Path) -> dict[int, Model]:
    return {cp: Model.open(NANO, Mesh(cp=cp), drafter, draft_tokens=3) for cp in (1, 2)}


@pytest.mark.parametrize("rule", ["token", "block"])
def test_tokens_are_the_same_alone_and_spread_overlapped_and_recorded(
    models: dict[int, Model], asks: list[Ask], rule: str
) -> None:
    alone = DecodeGroup(
        models[1],
        max_rows=1,
        max_len=24,
        depth=1,
        runner=Eager,
        draft_tokens=3,
        more={"acceptance": rule},
    )
    spread = DecodeGroup(
        models[2],
        max_rows=4,
        max_len=24,
        depth=2,
        runner=lambda: PassThrough((1, 2, 4)),
        draft_tokens=3,
        more={"acceptance": rule},
    )
    assert spread.play(asks) == [alone.play([ask])[0] for ask in asks]
    accepted = alone.accepted()
    assert sum(accepted[1:]) > 0, f"nothing was kept: {accepted}"
    assert accepted[0] > 0, f"nothing was dropped: {accepted}"
