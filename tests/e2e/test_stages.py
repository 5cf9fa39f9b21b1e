"""Prompts over pipeline stages, generation over context-parallel ranks or stages: tokens of a plain forward.

That stages compute the bits of one stage is shown in tests/unit/prefill_svc/core/test_stages.py, that they generate its
tokens in tests/sim/test_decode_stages.py; here real ranks, frames over gloo, every stage's writes into every decode
rank that holds its layers, and draft rows from the last stage.
"""

from __future__ import annotations

import asyncio

import httpx
import pytest

from k3.model.spec import K3Spec
from tests.drafters import random_drafter
from tests.e2e.cluster import Cluster
from tests.e2e.nano import nano_folder
from tests.e2e.oracle import Oracle
from tests.e2e.test_exactness import CASES, complete, expect_truth, flags
from tests.e2e.test_speculation import counters

pytestmark = [pytest.mark.e2e, pytest.mark.prefill]

ASKED = CASES[1::2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return nano_folder(tmp_path_factory.mktemp("model") / "k3-nano")


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


@pytest.mark.parametrize(
    ("prefill", "decode", "flavour", "stream"),
    [
        (("--pp", "2", "--tp", "2"), ("--cp", "2"), "gqa", "prefix"),
        (
            ("--pp", "4", "--parallel-partition", "1,4,3,1"),
            ("--pp", "2", "--parallel-partition", "2,7", "--parallel-pp-remote-kv", "true"),
            "mla",
            "mixture",
        ),
    ],
    ids=["pp2xtp2-cp2", "pp4-pp2"],
)
def test_all_prompts_at_once_give_the_tokens_of_a_plain_forward(
    folder, oracle, tmp_path, prefill, decode, flavour, stream
):
    target = K3Spec.from_folder(folder)
    own = ("--spec-drafter", str(random_drafter(tmp_path, target, flavour, seed=11, stream=stream)))
    with Cluster(
        prefill_flags=flags(folder, *own, *prefill, "--schedule-token-budget", "96"),
        decode_flags=flags(folder, *own, *decode, "--draft-tokens", "3"),
        router_flags=("--model-path", str(folder)),
    ) as cluster:

        async def ask() -> list[list[int]]:
            async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
                choices = await asyncio.gather(*(complete(client, case) for case in ASKED))
            return [choice["token_ids"] for choice in choices]

        for case, tokens in zip(ASKED, asyncio.run(ask()), strict=True):
            expect_truth(oracle, case, tokens)
        counted = counters(cluster)
        assert (counted["transferred"], counted["cold"]) == (len(ASKED), 0)
        assert counted["drafts"] > 0
        cluster.expect_baseline()
