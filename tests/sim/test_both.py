"""A decode instance that computes its own prompts: tokens are those of a forward without caches, in every layout.

Real ranks on threads under the service's own schedulers and line of plans; chunks of prompts and verify groups take
turns while requests come, leave and share what earlier ones left. Compared with plain decoding, each token of which is
checked against a forward without caches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from k3.types import SamplingParams, TokenEvent
from tests.both_group import BothGroup, heard
from tests.decode_group import Ask, Model
from tests.drafters import LocalEngine, random_drafter
from tests.e2e.oracle import Oracle
from tests.model_runner import solo_stage

pytestmark = pytest.mark.prefill

NANO = Path(__file__).parents[1] / "golden" / "k3"
SPEC = K3Spec.from_folder(NANO)
SHARED = 17  # tokens that the last prompts begin with
LENGTHS = (1, 3, 4, 5, 8, 13, 30, 21, 25)
N_TOKENS = 10
LONGEST = max(LENGTHS) + N_TOKENS
NOWHERE = TokenEvent(0)
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, seed=100),
    SamplingParams(temperature=0.0, presence_penalty=0.7, repetition_penalty=1.2),
)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    drawn = [[rng.randrange(SPEC.vocab_size) for _ in range(n)] for n in LENGTHS]
    return [
        p if len(p) < SHARED or i == 6 else [*drawn[6][:SHARED], *p[SHARED:]]
        for i, p in enumerate(drawn)
    ]


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


@pytest.fixture(scope="module")
def drafters(truth, tmp_path_factory) -> dict[str, Path | None]:
    known = [pair for ids in truth for pair in pairwise(ids)]
    folder = tmp_path_factory.mktemp("drafter")
    streams = {"mla": "mixture", "gqa": "prefix"}
    made = {
        kind: random_drafter(folder / kind, SPEC, kind, 11, stream, follows=known)
        for kind, stream in streams.items()
    }
    return {"off": None, **made}


def asks(order: Sequence[int]) -> list[Ask]:
    return [
        Ask(
            PROMPTS[i],
            {},
            NOWHERE,
            HOW[i],
            n_tokens=N_TOKENS - i % 4,
            leaves_after=3 if i % 5 == 0 else 0,
        )
        for i in order
    ]


def open_group(mesh: Mesh, drafter: Path | None, prefix: str, rows: int, **more) -> BothGroup:
    n_slots = rows + 1 + (6 if prefix == "on" else 0)
    return BothGroup(
        Model.open(NANO, mesh, drafter),
        max_rows=rows,
        max_len=LONGEST,
        depth=2,
        draft_tokens=7 if drafter is not None else 0,
        cache={"prefix": prefix, "checkpoint_interval": 8, "state_slots": n_slots},
        schedule={"token_budget": 7},
        **more,
    )


@pytest.mark.parametrize(
    ("mesh", "kind", "prefix"),
    [
        (Mesh(), "off", "off"),
        (Mesh(), "gqa", "on"),
        (Mesh(2), "mla", "off"),
        (Mesh(2), "off", "on"),
        (Mesh(1, 2), "mla", "on"),
        (Mesh(1, 2), "off", "off"),
        (Mesh(2, 2), "gqa", "on"),
        (Mesh(2, 2), "mla", "off"),
    ],
    ids=str,
)
def test_tokens_are_those_of_plain_decoding(mesh, kind, prefix, drafters, truth) -> None:
    """All prompts, then the long ones again, which a cache knows by then."""
    group = open_group(mesh, drafters[kind], prefix, rows=4)
    order = [*range(len(PROMPTS)), 8, 7, 6]
    wanted = asks(order)
    for i, ask, ids in zip(order, wanted, group.play(wanted), strict=True):
        assert ids == truth[i][: ask.n_tokens], f"prompt of {LENGTHS[i]} tokens"
    assert "cgc" in group.kinds, "chunks and groups never took turns"
    assert group.is_clean()
    hits = group.local.prompts.cache.totals()["hit_tokens"]
    assert (hits > 50) is (prefix == "on"), f"{hits} tokens found"
    for key, caller in group.callers.items():
        assert heard(caller) == [token.id for token in group.requests[key - 1].outputs[:1]]
