"""Speculation through real services: tokens of a plain forward, greedy and seeded, whatever the drafts.

k3-nano drafts at random weights, so nearly every draft is rejected; rings of 64 tokens wrap in the longer prompts. What
trained drafts are worth is in `test_acceptance.py`, every other combination in `tests/sim/test_exactness_matrix.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from k3.model.spec import K3Spec
from tests.drafters import random_drafter
from tests.e2e.cluster import Cluster, metric
from tests.e2e.nano import nano_folder
from tests.e2e.oracle import Oracle
from tests.e2e.test_exactness import CASES, KINDS, Case, all_at_once, complete, expect_truth, flags

pytestmark = [pytest.mark.e2e, pytest.mark.dspark]

SPECULATE = ("--draft-tokens", "7", "--spec-draft-window", "64")
# random drafts are worth nothing, so the gate closes with the second answer and tries again soon
GATE = ("--spec-gate-window", "2", "--spec-gate-retry-steps", "3")


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


@dataclass(frozen=True)
class Setting:
    """A drafter and what decode does with it. is_cold: prefill has no drafter."""

    flavour: str
    stream: str
    layout: tuple[str, ...] = ()
    is_cold: bool = False

    @property
    def cases(self) -> tuple[Case, ...]:
        """Every rank computes all of them, so groups of ranks get half, of every kind."""
        half = tuple(case for i, case in enumerate(CASES) if (i + i // len(KINDS)) % 2 == 0)
        return half if "2" in self.layout else CASES


SETTINGS = {
    "mla": Setting("mla", "prefix"),
    "gqa-cp2": Setting("gqa", "mixture", ("--parallel-cp", "2")),
    "cold-tp2": Setting("mla", "mixture", ("--parallel-tp", "2"), is_cold=True),
    "replay-gate": Setting("gqa", "prefix", ("--spec-kda-rollback", "replay", *GATE)),
}


@pytest.fixture(scope="module")
def start(folder, tmp_path_factory) -> Callable[[Setting], Cluster]:
    def make(setting: Setting) -> Cluster:
        path: Path = tmp_path_factory.mktemp("drafter") / setting.flavour
        target = K3Spec.from_folder(folder)
        drafter = random_drafter(path, target, setting.flavour, seed=11, stream=setting.stream)
        own = ("--spec-drafter", str(drafter))
        return Cluster(
            prefill_flags=flags(
                folder, "--schedule-token-budget", "96", *(() if setting.is_cold else own)
            ),
            decode_flags=flags(folder, *own, *SPECULATE, *setting.layout),
            router_flags=("--model-path", str(folder)),
        )

    return make


@pytest.fixture(scope="module")
def simplest(start) -> Iterator[Cluster]:
    with start(SETTINGS["mla"]) as running:
        yield running
        running.expect_baseline()


def expect_everything(cluster: Cluster, oracle: Oracle, setting: Setting) -> None:
    """The first requests of a cluster: their tokens, and what is counted of them."""
    cases = setting.cases
    for case, tokens in zip(cases, asyncio.run(all_at_once(cluster.url, cases)), strict=True):
        expect_truth(oracle, case, tokens)
    counted = counters(cluster)
    kind = "cold" if setting.is_cold else "transferred"
    assert counted[kind] == len(cases) == counted["transferred"] + counted["cold"]
    assert counted["drafts"] == 7 * counted["steps"] > 0
    changes = {to: gate_changes(cluster, to) for to in ("open", "closed")}
    if GATE[0] in setting.layout:
        assert changes["closed"] >= 1, changes
        assert changes["open"] in (changes["closed"], changes["closed"] - 1), changes
    else:
        assert changes == {"open": 0, "closed": 0}


def test_all_prompts_at_once_give_the_tokens_of_a_plain_forward(simplest, oracle):
    expect_everything(simplest, oracle, SETTINGS["mla"])


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "mla"])
def test_other_settings_give_the_same_tokens(start, oracle, name):
    with start(SETTINGS[name]) as cluster:
        expect_everything(cluster, oracle, SETTINGS[name])
        cluster.expect_baseline()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rules_that_weigh_drafts_draw_what_the_target_may_draw(start, oracle, rule):
    """Greedy tokens are the target's own, others are among those that its filters leave."""
    cases = tuple(CASES[i] for i in (0, 2, 3, 4, 5, 8, 9, 11))
    with start(Setting("mla", "prefix", ("--spec-acceptance", rule))) as cluster:
        for case, tokens in zip(cases, asyncio.run(all_at_once(cluster.url, cases)), strict=True):
            likely = oracle.probabilities(case.prompt, tokens, case.params)
            assert min(likely) > 0, (case, tokens, likely)
        assert counters(cluster)["drafts"] > 0
        cluster.expect_baseline()


def gate_changes(cluster: Cluster, to: str) -> int:
    text = httpx.get(f"http://{cluster.decodes[0].ops}/metrics").text
    return int(metric(text, "k3_spec_gate_changes_total", to=to) or 0)


async def test_end_ids_and_the_length_limit_end_an_answer_inside_a_group(simplest):
    """With k3-nano every group is one token long or more; the answer is cut exactly where plain decoding ends."""
    async with httpx.AsyncClient(base_url=simplest.url, timeout=60) as client:
        whole = (await complete(client, CASES[4]))["token_ids"]
        stop = whole[9]
        cut = await complete(client, CASES[4], stop_token_ids=[stop])
        short = await complete(client, CASES[4], max_tokens=6)
    assert cut["token_ids"] == whole[: whole.index(stop) + 1]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert short["token_ids"] == whole[:6]
    assert short["finish_reason"] == "length"
