"""Speculation through real services: tokens of a plain forward whatever the drafts, and drafts that are worth it.

k3-nano drafts at random weights, so nearly every draft is rejected; k3-mini drafts with its trained drafter, so most
are accepted. Rings of 64 tokens wrap in the longer prompts.
"""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from k3.config.resolve import EMBEDDED_MODEL
from k3.model.dspark_spec import DraftSpec
from k3.model.spec import K3Spec
from k3.types import SamplingParams
from tests.drafters import LocalEngine, random_drafter
from tests.e2e.cluster import Cluster, metric
from tests.e2e.nano import ROOT, nano_folder
from tests.e2e.oracle import Oracle
from tests.e2e.test_exactness import CASES, all_at_once, complete, expect_truth, flags
from tests.model_runner import solo_stage

pytestmark = [pytest.mark.e2e, pytest.mark.dspark]

SPECULATE = ("--draft-tokens", "7", "--spec-draft-window", "64")
# random drafts are worth nothing, so the gate closes with the second answer and tries again soon
GATE = ("--spec-gate-window", "2", "--spec-gate-retry-steps", "3")
N_ITEMS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return nano_folder(tmp_path_factory.mktemp("model") / "k3-nano")


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


def counters(cluster: Cluster) -> dict[str, float]:
    """Sums over the life of the decode instance."""
    text = httpx.get(f"http://{cluster.decodes[0].ops}/metrics").text
    names = {
        "steps": ("k3_spec_drafts_total", {}),
        "drafts": ("k3_spec_draft_tokens_total", {}),
        "accepted": ("k3_spec_accepted_tokens_total", {}),
        "tokens": ("k3_decode_tokens_total", {}),
        "transferred": ("k3_draft_bootstrap_total", {"kind": "transferred"}),
        "cold": ("k3_draft_bootstrap_total", {"kind": "cold"}),
    }
    return {key: metric(text, name, **labels) or 0.0 for key, (name, labels) in names.items()}


@pytest.mark.parametrize(
    ("flavour", "stream", "layout", "prefill_drafts"),
    [
        ("mla", "prefix", (), True),
        ("gqa", "mixture", ("--parallel-cp", "2"), True),
        ("mla", "mixture", ("--parallel-tp", "2"), False),
        ("gqa", "prefix", ("--spec-kda-rollback", "replay", *GATE), True),
    ],
    ids=["mla", "gqa-cp2", "cold-tp2", "replay-gate"],
)
def test_all_prompts_at_once_give_the_tokens_of_a_plain_forward(
    folder, oracle, tmp_path, flavour, stream, layout, prefill_drafts
):
    drafter = random_drafter(
        tmp_path / "draft", K3Spec.from_folder(folder), flavour, seed=11, stream=stream
    )
    own = ("--spec-drafter", str(drafter))
    with Cluster(
        prefill_flags=flags(
            folder, "--schedule-token-budget", "96", *(own if prefill_drafts else ())
        ),
        decode_flags=flags(folder, *own, *SPECULATE, *layout),
        router_flags=("--model-path", str(folder)),
    ) as cluster:
        for case, tokens in zip(CASES, asyncio.run(all_at_once(cluster.url)), strict=True):
            expect_truth(oracle, case, tokens)
        counted = counters(cluster)
        kind = "transferred" if prefill_drafts else "cold"
        assert counted[kind] == len(CASES) == counted["transferred"] + counted["cold"]
        assert counted["drafts"] == 7 * counted["steps"] > 0
        changes = {to: gate_changes(cluster, to) for to in ("open", "closed")}
        if GATE[0] in layout:
            assert changes["closed"] >= 1, changes
            assert changes["open"] in (changes["closed"], changes["closed"] - 1), changes
        else:
            assert changes == {"open": 0, "closed": 0}
        cluster.expect_baseline()


def gate_changes(cluster: Cluster, to: str) -> int:
    text = httpx.get(f"http://{cluster.decodes[0].ops}/metrics").text
    return int(metric(text, "k3_spec_gate_changes_total", to=to) or 0)


def questions() -> list[list[dict[str, str]]]:
    lines = (ROOT / "k3/assets/eval/arith_forms.jsonl").read_text().splitlines()
    return [json.loads(line)["turns"] for line in lines[:: len(lines) // N_ITEMS][:N_ITEMS]]


def answers(cluster: Cluster, **more: object) -> list[dict]:
    async def ask() -> list[dict]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            bodies = [
                {"model": "k3-mini", "messages": turns, "max_tokens": 160, "temperature": 0} | more
                for turns in questions()
            ]
            sent = (client.post("/v1/chat/completions", json=body) for body in bodies)
            return [response.json() for response in await asyncio.gather(*sent)]

    return asyncio.run(ask())


def test_trained_drafts_are_accepted_as_in_one_process_and_answers_stay_the_same():
    """The same prompts in one process, without a hand-over, are the yardstick; a blind drafter falls far below it."""
    own = ("--drafter", "draft-mla")
    speculate = (*own, "--draft-tokens", "7")
    with Cluster() as cluster:
        plain = answers(cluster)
    with Cluster(prefill_flags=own, decode_flags=speculate) as cluster:
        drafted = answers(cluster, return_spec_stats=True, return_token_ids=True)
        counted = counters(cluster)
    with Cluster(decode_flags=speculate) as cluster:
        blind = answers(cluster)
        blind_counted = counters(cluster)
    for other in (drafted, blind):
        assert [text(a) for a in other] == [text(a) for a in plain]
    length, blind_length = (c["tokens"] / c["steps"] for c in (counted, blind_counted))
    local = local_length(drafted)
    shown = f"tokens per step: {length:.3f}, in one process {local:.3f}, blind {blind_length:.3f}"
    assert length == pytest.approx(local, rel=0.01), shown
    assert blind_length < 0.7 * length, shown
    assert counted["transferred"] == N_ITEMS == blind_counted["cold"]
    reported = [a["metrics"]["speculative_decoding"] for a in drafted]
    assert sum(r["num_spec_steps"] for r in reported) == counted["steps"]
    assert sum(r["num_accepted_draft_tokens"] for r in reported) == counted["accepted"]
    assert all(len(r["acceptance_histogram"]) == 8 for r in reported)
    assert all(sum(r["acceptance_histogram"]) == r["num_spec_steps"] for r in reported)
    assert "metrics" not in plain[0]


def text(answer: dict) -> dict[str, str]:
    return answer["choices"][0]["message"]


def local_length(answered: list[dict]) -> float:
    """Tokens per step of the same prompts and answers in one process."""
    folder = EMBEDDED_MODEL / "draft-mla"
    stage = solo_stage(EMBEDDED_MODEL, "float32", taps=DraftSpec.from_folder(folder).taps)
    n_tokens = n_steps = 0
    for answer in answered:
        prompt, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        engine = LocalEngine(
            stage,
            1,
            len(prompt) + len(ids),
            drafter=folder,
            draft_tokens=7,
            page_tokens=16,
            dtype="float32",
        )
        [local] = engine.generate([prompt], len(ids), [SamplingParams(temperature=0.0)], chunk=256)
        assert local.ids == ids
        n_tokens += len(ids) - 1
        n_steps += len(local.accepted)
    return n_tokens / n_steps


async def test_end_ids_and_the_length_limit_end_an_answer_inside_a_group(folder, oracle, tmp_path):
    """With k3-nano every group is one token long or more; the answer is cut exactly where plain decoding ends."""
    drafter = random_drafter(tmp_path / "draft", K3Spec.from_folder(folder), "mla", seed=3)
    own = ("--spec-drafter", str(drafter))
    with Cluster(
        prefill_flags=flags(folder, *own),
        decode_flags=flags(folder, *own, *SPECULATE),
        router_flags=("--model-path", str(folder)),
    ) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            whole = (await complete(client, CASES[4]))["token_ids"]
            stop = whole[9]
            cut = await complete(client, CASES[4], stop_token_ids=[stop])
            short = await complete(client, CASES[4], max_tokens=6)
    assert cut["token_ids"] == whole[: whole.index(stop) + 1]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert short["token_ids"] == whole[:6]
    assert short["finish_reason"] == "length"
