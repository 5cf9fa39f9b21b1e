"""The rank that prefills for itself gives the tokens of a forward without caches, with drafts and without."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from decode_svc.rank.alone import Alone, request_spec
from k3.config import load
from k3.config.commandline import ENGINE_ALIASES, parse
from k3.config.tree import EngineConfig
from k3.errors import ConfigError
from k3.model.spec import K3Spec
from tests.drafters import random_drafter
from tests.e2e.oracle import Oracle

pytestmark = pytest.mark.dspark

NANO = Path(__file__).parents[1] / "golden" / "k3"
LENGTHS = (1, 9, 30, 4, 17)
LIMITS = (8, 12, 10, 1, 6)


def lines() -> list[str]:
    rng = random.Random(12)
    return [
        json.dumps(
            {
                "prompt": [rng.randrange(512) for _ in range(n)],
                "max_tokens": limit,
                "end_ids": [],
                "temperature": 0.8 if n % 2 else 0,
                "seed": n,
            }
        )
        for n, limit in zip(LENGTHS, LIMITS, strict=True)
    ]


def config(*flags: str) -> EngineConfig:
    words = (
        *("--preset", "tiny-test", "--model", str(NANO), "--page-tokens", "4", "--max-rows", "2"),
        *(
            "--schedule-token-budget",
            "7",
            "--model-max-model-len",
            "64",
            "--schedule-max-queue",
            "9",
        ),
    )
    line = parse("k3-decode", EngineConfig, ENGINE_ALIASES, [*words, *flags])
    return load.load_engine("decode", line, {}).require()


@pytest.mark.parametrize("window", [0, 8])
def test_answers_are_those_of_a_forward_without_caches(tmp_path: Path, window: int) -> None:
    specs = [request_spec(i, line) for i, line in enumerate(lines())]
    oracle = Oracle(NANO)
    plain = Alone(config()).answer(specs)
    answers = [[token.id for token in request.outputs] for request in plain]
    for spec, ids in zip(specs, answers, strict=True):
        truth = [event.id for event in oracle.redraw(spec.prompt, ids, spec.sampling)]
        assert ids == truth
        assert len(ids) == spec.stop.max_tokens
    known = [pair for ids in answers for pair in pairwise(ids)]
    folder = random_drafter(tmp_path / "d", K3Spec.from_folder(NANO), "mla", 2, follows=known)
    drafting = Alone(
        config(
            *("--drafter", str(folder), "--draft-tokens", "7"),
            *("--spec-draft-window", str(window)),
        )
    )
    drafted = drafting.answer(specs)
    assert [[token.id for token in request.outputs] for request in drafted] == answers
    totals = [request.drafts.total for request in drafted]
    assert sum(total.n_accepted for total in totals if total) > 10
    assert drafting.totals.n_steps > 0
    assert drafting.totals.step_s > drafting.totals.forward_s > 0


def test_more_ranks_than_one_and_lines_that_are_no_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="one process is one rank"):
        Alone(config("--cp", "2"))
    with pytest.raises(ConfigError, match=r"line 3.*'max_tokens'"):
        request_spec(3, '{"prompt": [1], "temperature": 0, "seed": 1}')
