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
def continuations() -> list[list[int]]:
    """Of all samples, a token of each at a time."""
    stage: Stage = solo_stage(FOLDER, "float32")
    longest = max(len(sample["prompt_ids"]) + len(sample["answer_ids"]) for sample in SAMPLES)
    pools = Pools(stage, len(SAMPLES), longest, page_tokens=32)
    got = [
        [int(pools.prefill(request, sample["prompt_ids"], 256)[-1].argmax())]
        for request, sample in zip(pools.requests, SAMPLES, strict=True)
    ]
    while True:
        open_ = [i for i, ids in enumerate(got) if len(ids) < len(SAMPLES[i]["answer_ids"])]
        if not open_:
            return got
        rows = [(pools.requests[i], got[i][-1:]) for i in open_]
        for i, logits in zip(open_, pools.verify(rows, [0] * len(rows)), strict=True):
            got[i].append(int(logits[0].argmax()))


@pytest.mark.parametrize("i", range(len(SAMPLES)))
def test_greedy_continuation_of_every_sample_is_the_recorded_one(
    continuations: list[list[int]], i: int
) -> None:
    sample = SAMPLES[i]
    assert sample["min_top2_gap"] > 1e-3, "ids are comparable only where the gap is real"
    assert continuations[i] == sample["answer_ids"]
