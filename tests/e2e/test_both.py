"""Real services whose decode instance computes prompts itself: every one (`--role both`), or short ones.

Tokens are those of a plain forward, prompts asked again are found in the cache, clients leave in the middle, a rank is
killed, and everything comes back. That all layouts and drafters agree is shown in tests/sim/test_both.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import httpx
import pytest

from k3.model.spec import K3Spec
from tests.chaos.generation import Generation
from tests.drafters import random_drafter
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.nano import nano_folder
from tests.e2e.oracle import Oracle
from tests.e2e.test_exactness import CASES, Case, expect_truth, flags

pytestmark = [pytest.mark.e2e, pytest.mark.prefill]

ASKED = CASES[3::4]
SHORT = 64  # tokens up to which decode computes prompts itself
BUDGET = ("--schedule-token-budget", "96")
BACK_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return nano_folder(tmp_path_factory.mktemp("model") / "k3-nano")


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


def drafting(folder, tmp_path) -> tuple[str, ...]:
    target = K3Spec.from_folder(folder)
    drafter = random_drafter(tmp_path / "drafter", target, "mla", seed=11, stream="prefix")
    return ("--spec-drafter", str(drafter))


def ask(cluster: Cluster, oracle: Oracle, cases: Sequence[Case]) -> list[int]:
    """All at once; tokens of each prompt that were found in a cache."""

    async def one(client: httpx.AsyncClient, case: Case) -> int:
        answer = await client.post("/v1/completions", json=case.body())
        assert answer.status_code == 200, answer.text
        body = answer.json()
        expect_truth(oracle, case, body["choices"][0]["token_ids"])
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def everybody() -> list[int]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            return await asyncio.gather(*(one(client, case) for case in cases))

    return asyncio.run(everybody())


def test_an_instance_that_computes_every_prompt_needs_no_other(folder, oracle, tmp_path):
    cases = ASKED[1:5]
    own = (*drafting(folder, tmp_path), "--draft-tokens", "3")
    layout = ("--role", "both", "--pp", "2", *BUDGET)
    cache = (
        "--cache-prefix",
        "on",
        "--cache-checkpoint-interval",
        "32",
        "--cache-checkpoints",
        "64",
    )
    with Cluster(
        n_prefills=0,
        decode_flags=flags(folder, *own, *layout, *cache),
        router_flags=("--model-path", str(folder)),
    ) as cluster:
        decode = cluster.decodes[0]
        assert sum(ask(cluster, oracle, cases)) == 0
        found = ask(cluster, oracle, cases)
        long = [i for i, case in enumerate(cases) if len(case.prompt) > 40]
        assert all(found[i] >= 32 for i in long), found
        assert cluster.gauge(decode, "k3_prefix_hit_tokens_total") == sum(found)
        assert cluster.gauge(decode, "k3_local_prefill_prompts_total") == 2 * len(cases)
        assert cluster.gauge(decode, "k3_spec_draft_tokens_total") > 0
        assert cluster.gauge(decode, "k3_draft_bootstrap_total", kind="local") > 0

        prompt = list(CASES[8].prompt)
        with Generation(cluster.url, prompt, max_tokens=3000) as leaving:
            wait_for(lambda: leaving.tokens, BACK_S, "its first token")
        cluster.expect_baseline()

        lost = Generation(cluster.url, prompt, max_tokens=3000)
        wait_for(lambda: lost.tokens, BACK_S, "its first token")
        ranks = cluster.ranks(decode)
        os.kill(ranks[0], signal.SIGKILL)
        lost.wait(60)
        assert lost.error is not None
        assert lost.error["code"] == "instance_failed", lost.error
        wait_for(lambda: cluster.is_ready(decode), BACK_S, "new ranks", poll_s=0.2)
        wait_for(lambda: cluster.is_ready(cluster.router), BACK_S, "the router", poll_s=0.2)
        assert ask(cluster, oracle, cases[:1]) == [0]  # the cache went with the ranks
        cluster.expect_baseline()


def test_short_prompts_are_computed_where_they_are_decoded(folder, oracle, tmp_path):
    own = drafting(folder, tmp_path)
    with Cluster(
        prefill_flags=flags(folder, *own, *BUDGET),
        decode_flags=flags(
            folder,
            *own,
            *BUDGET,
            *("--draft-tokens", "3", "--schedule-local-prefill-max", str(SHORT)),
        ),
        router_flags=("--model-path", str(folder)),
    ) as cluster:
        ask(cluster, oracle, ASKED)
        n_short = sum(len(case.prompt) <= SHORT for case in ASKED)
        decode, prefill = cluster.decodes[0], cluster.prefills[0]
        assert 2 < n_short < len(ASKED) - 2
        assert cluster.gauge(decode, "k3_local_prefill_prompts_total") == n_short
        assert cluster.gauge(prefill, "k3_transfer_seconds_count") == len(ASKED) - n_short
        n_tokens = sum(len(case.prompt) for case in ASKED if len(case.prompt) <= SHORT)
        assert cluster.gauge(decode, "k3_local_prefill_tokens_total") == n_tokens
        cluster.expect_baseline()
