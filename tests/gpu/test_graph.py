"""Recorded decode steps on a GPU: the trained model answers as it does eagerly, and as other software says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decode_svc.rank.alone import Alone
from decode_svc.request import RequestSpec
from k3.config import load
from k3.config.commandline import ENGINE_ALIASES, parse
from k3.config.tree import EngineConfig
from k3.types import RequestId, SamplingParams, StopParams

MODEL = Path(__file__).parents[2] / "k3/assets/tiny"
SAMPLES = json.loads((MODEL / "samples.json").read_text())
DRAFTING = ("--drafter", "draft-mla", "--draft-tokens", "7")
GREEDY = SamplingParams(temperature=0.0)
KINDS = (
    GREEDY,
    SamplingParams(temperature=0.7, seed=5),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=6),
    SamplingParams(temperature=0.8, seed=7, min_tokens=3, logit_bias={281: 1.0}),
)


def config(*flags: str) -> EngineConfig:
    words = (
        *("--preset", "tiny-demo", "--model-device", "cuda", "--model-dtype", "float32"),
        *("--max-rows", "5", "--model-max-model-len", "1024", "--schedule-max-queue", "20"),
    )
    line = parse("k3-decode", EngineConfig, ENGINE_ALIASES, [*words, *flags])
    return load.load_engine("decode", line, {}).require()


def asked(params: tuple[SamplingParams, ...]) -> list[RequestSpec]:
    """Every sample, as many tokens as were recorded."""
    return [
        RequestSpec(
            RequestId(str(i)),
            tuple(sample["prompt_ids"]),
            params[i % len(params)],
            StopParams(len(sample["answer_ids"])),
        )
        for i, sample in enumerate(SAMPLES)
        if len(sample["prompt_ids"]) + len(sample["answer_ids"]) < 900
    ]


def answers(params: tuple[SamplingParams, ...], *flags: str) -> list[list[int]]:
    return [[t.id for t in r.outputs] for r in Alone(config(*flags)).answer(asked(params))]


@pytest.mark.parametrize("drafting", [(), DRAFTING], ids=["plain", "dspark"])
def test_recorded_steps_give_the_answers_an_independent_implementation_gave(
    drafting: tuple[str, ...],
) -> None:
    recorded = {tuple(s["prompt_ids"]): s["answer_ids"] for s in SAMPLES}
    for spec, ids in zip(asked((GREEDY,)), answers((GREEDY,), *drafting), strict=True):
        assert ids == recorded[spec.prompt], spec.request_id


@pytest.mark.parametrize("drafting", [(), DRAFTING], ids=["plain", "dspark"])
def test_recorded_steps_draw_what_eager_ones_draw(drafting: tuple[str, ...]) -> None:
    """Rows come and go, kinds of drawing mix: sizes and flavours change under the recordings."""
    eager = answers(KINDS, *drafting, "--backends-graphs", "off")
    assert answers(KINDS, *drafting, "--backends-graphs", "on") == eager


def test_few_graphs_kept_give_the_same_answers() -> None:
    assert answers(KINDS, "--backends-max-graphs", "1") == answers(KINDS)
