"""The shipped model gives the greedy continuations an independent float32 implementation gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3.model.k3 import Stage
from tests.model_runner import Pools, solo_stage

FOLDER = Path(__file__).parents[2] / "k3/assets/tiny"
SAMPLES = json.loads((FOLDER / "samples.json").read_text())


@pytest.fixture(scope="module")
def stage() -> Stage:
    return solo_stage(FOLDER, "float32")


@pytest.mark.parametrize("i", range(len(SAMPLES)))
def test_greedy_continuation_of_every_sample_is_the_recorded_one(stage: Stage, i: int) -> None:
    sample = SAMPLES[i]
    prompt, answer = sample["prompt_ids"], sample["answer_ids"]
    assert sample["min_top2_gap"] > 1e-3, "ids are comparable only where the gap is real"
    pools = Pools(stage, 1, len(prompt) + len(answer), page_tokens=32)
    request = pools.requests[0]
    got = [int(pools.prefill(request, prompt, 256)[-1].argmax())]
    while len(got) < len(answer):
        got.append(int(pools.verify([(request, got[-1:])], [0])[0, 0].argmax()))
    assert got == answer
