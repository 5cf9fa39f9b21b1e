"""Decode over 2, 4 and 8 context ranks gives the tokens of a plain forward: every page size, every boundary, float64.

Real ranks under the real scheduler, a thread each. Prompts end exactly on and one past every page boundary of the
first super-block and of the next ones; some are shorter than a page, so that ranks hold nothing. Equal to a forward
without caches means equal to one rank.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from k3.types import SamplingParams, TokenEvent
from tests.decode_group import Ask, DecodeGroup, Model
from tests.drafters import random_drafter
from tests.e2e.nano import wide_nano_folder
from tests.e2e.oracle import Oracle
from tests.prefilled import Prefill

pytestmark = pytest.mark.helix

N_TOKENS, ROWS, LONG, FIRST = 6, 16, 5000, 77
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.8, top_p=0.9, seed=-5, presence_penalty=0.5),
)


@dataclass(frozen=True)
class Spread:
    """A group of ranks: what they send each other, whether they verify drafts."""

    cp: int
    exchange: str
    drafts: int = 0


SPREADS = (Spread(2, "latent"), Spread(4, "gather", 3), Spread(8, "value"))


def lengths(page: int, cp: int) -> list[int]:
    """One token, less than a page, and both sides of every page boundary up to the second super-block."""
    edges = [page * i for i in range(1, cp + 1)] + [page * (cp + 1), 2 * page * cp]
    return [1, page - 1, *(n + past for n in edges for past in (0, 1))]


def prompt_of(n: int) -> list[int]:
    rng = random.Random(n)
    return [rng.randrange(512) for _ in range(n)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return wide_nano_folder(tmp_path_factory.mktemp("model") / "wide")


@pytest.fixture(scope="module")
def drafter(folder, tmp_path_factory) -> Path:
    return random_drafter(
        tmp_path_factory.mktemp("drafter"), K3Spec.from_folder(folder), "mla", seed=3
    )


@pytest.fixture(scope="module")
def truth(folder):
    """Tokens that should stand where an answer's stand; the first one is the test's own choice."""
    oracle = Oracle(folder)

    @cache
    def redraw(n: int, kind: int, answer: tuple[int, ...]) -> list[int]:
        drawn = oracle.redraw(prompt_of(n), answer, KINDS[kind])
        return [FIRST, *(event.id for event in drawn[1:])]

    return redraw


@pytest.fixture(scope="module")
def sent(folder, drafter):
    """What prefill sends of a prompt, draft rows included; a group without a drafter has no pool for them."""
    prefill = cache(lambda page: Prefill(folder, drafter, page_tokens=page))
    return cache(lambda n, page: prefill(page)(prompt_of(n), 512))


@pytest.fixture(scope="module", params=SPREADS, ids=lambda s: f"cp{s.cp}-{s.exchange}")
def model(request, folder, drafter) -> tuple[Spread, Model]:
    spread: Spread = request.param
    opened = Model.open(
        folder,
        Mesh(cp=spread.cp),
        drafter if spread.drafts else None,
        draft_tokens=spread.drafts,
        exchange=spread.exchange,
    )
    return spread, opened


def check(model, sent, truth, page: int, batches: Sequence[Sequence[int]], rows: int) -> None:
    """Play every batch of prompt lengths in one instance."""
    spread, opened = model
    group = DecodeGroup(
        opened,
        max_rows=rows,
        max_len=max(n for batch in batches for n in batch) + N_TOKENS,
        depth=2,
        draft_tokens=spread.drafts,
        window=64,
        page_tokens=page,
    )
    for batch in batches:
        kinds = [n % len(KINDS) for n in batch]
        asks = [
            Ask(
                prompt_of(n),
                sent(n, page),
                TokenEvent(FIRST),
                KINDS[kind],
                N_TOKENS,
            )
            for n, kind in zip(batch, kinds, strict=True)
        ]
        for n, kind, answer in zip(batch, kinds, group.play(asks), strict=True):
            assert len(answer) == N_TOKENS
            assert answer == truth(n, kind, tuple(answer)), f"prompt of {n} tokens"


@pytest.mark.parametrize("page", [4, 16, 32])
def test_prompts_on_both_sides_of_every_boundary_alone_and_sixteen_at_once(
    model, sent, truth, page: int
) -> None:
    cp = model[0].cp
    everybody = lengths(page, cp)
    check(model, sent, truth, page, [everybody, [1], [page * cp + 1]], ROWS)


def test_a_prompt_of_five_thousand_tokens_beside_one_of_one(model, sent, truth) -> None:
    check(model, sent, truth, 16, [[LONG, 1]], 2)
