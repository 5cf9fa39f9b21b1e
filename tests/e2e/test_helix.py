"""Decode with the latent cache spread over ranks: served tokens equal a plain forward, token for token, in float64.

Without drafts, and with verify groups of four that straddle pages and ranks, of a drafter of either flavour.

Prompts sit on and around every boundary of pages and super-blocks; some are shorter than one page of every rank, so
ranks hold nothing at first. Every answer is drawn alone and with all others, greedy and seeded; equal to the oracle
means equal to cp 1. Gauges and `/admin/ledger` show the shares while a request runs.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import httpx
import pytest

from k3.cluster import get
from k3.model.spec import K3Spec
from k3.types import SamplingParams
from tests.chaos.generation import Generation
from tests.drafters import random_drafter
from tests.e2e.cluster import Cluster, metric, wait_for
from tests.e2e.nano import nano_folder
from tests.e2e.oracle import Oracle

pytestmark = [pytest.mark.e2e, pytest.mark.helix]

ANSWER, DRAFTS = 7, 3
# One token; around a page and a super-block of 4 x 2, 32 x (2 x 2) and 16 x 4; long.
LENGTHS = (1, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 129, 600)
ALONE = (0, 5, 13)
LONG = 5000
TOKEN_BYTES = 3 * (32 + 8) * 8  # MLA layers, latent and shared key dims, float64
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.8, top_p=0.9, seed=-5, presence_penalty=0.5),
)


@dataclass(frozen=True)
class Layout:
    """A decode group: its flags, page size, ranks of a context group, flavour of its drafter."""

    name: str
    flags: tuple[str, ...]
    page: int
    cp: int
    drafter: str = ""


LAYOUTS = (
    Layout("cp2", ("--cp", "2"), 4, 2),
    Layout("cp4-mla-drafts", ("--cp", "4"), 16, 4, "mla"),
    Layout(
        "tp2-cp2-latents-gqa-drafts",
        ("--tp", "2", "--cp", "2", "--parallel-exchange", "latent"),
        32,
        2,
        "gqa",
    ),
)


def prompt_of(n: int) -> list[int]:
    rng = random.Random(n)
    return [rng.randrange(256) for _ in range(n)]


def body(i: int) -> dict[str, object]:
    p = KINDS[i % len(KINDS)]
    return {
        "prompt": prompt_of(LENGTHS[i]),
        "max_tokens": ANSWER,
        "temperature": p.temperature,
        "top_p": p.top_p,
        "presence_penalty": p.presence_penalty,
        "seed": p.seed,
        "ignore_eos": True,
        "return_token_ids": True,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return nano_folder(tmp_path_factory.mktemp("model") / "k3-nano", context=8192)


@pytest.fixture(scope="module")
def truth(folder):
    """Tokens that should stand where an answer's stand; the same answers are computed once."""
    oracle = Oracle(folder)

    @cache
    def redraw(i: int, tokens: tuple[int, ...]) -> list[int]:
        drawn = oracle.redraw(prompt_of(LENGTHS[i]), tokens, KINDS[i % len(KINDS)])
        return [event.id for event in drawn]

    return redraw


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: layout.name)
def layout(request) -> Layout:
    return request.param


@pytest.fixture(scope="module")
def cluster(layout: Layout, folder, tmp_path_factory) -> Iterator[Cluster]:
    common: tuple[str, ...] = (
        "--model-path", str(folder), "--model-dtype", "float64", "--cache-fill-nan", "true",
        "--cache-page-tokens", str(layout.page), "--schedule-max-rows", "16",
    )  # fmt: skip
    drafts: tuple[str, ...] = ()
    if layout.drafter:
        target = K3Spec.from_folder(folder)
        place = tmp_path_factory.mktemp("drafter")
        common += ("--spec-drafter", str(random_drafter(place, target, layout.drafter, seed=3)))
        drafts = ("--spec-draft-tokens", str(DRAFTS))
    with Cluster(
        prefill_flags=(*common, "--schedule-token-budget", "250"),
        decode_flags=(*common, *layout.flags, *drafts),
        router_flags=("--model-path", str(folder)),
    ) as running:
        yield running
        running.expect_baseline()


async def complete(client: httpx.AsyncClient, i: int) -> tuple[int, ...]:
    answer = await client.post("/v1/completions", json=body(i))
    assert answer.status_code == 200, answer.text
    return tuple(answer.json()["choices"][0]["token_ids"])


def expect(truth, i: int, tokens: tuple[int, ...]) -> None:
    assert len(tokens) == ANSWER
    assert list(tokens) == truth(i, tokens), f"prompt of {LENGTHS[i]} tokens"


async def test_prompts_one_by_one_give_the_tokens_of_a_plain_forward(cluster, truth):
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        for i in ALONE:
            expect(truth, i, await complete(client, i))


async def test_sixteen_prompts_at_once_give_the_same_tokens(cluster, truth):
    everybody = range(len(LENGTHS))
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        answers = await asyncio.gather(*(complete(client, i) for i in everybody))
    for i, tokens in zip(everybody, answers, strict=True):
        expect(truth, i, tokens)


def test_gauges_and_the_ledger_page_show_the_shares_of_a_running_request(cluster, layout):
    decode = cluster.decodes[0]
    n = LONG if layout.cp == 4 else 600
    with Generation(cluster.url, prompt_of(n), max_tokens=1500) as generation:
        generation.wait_first()

        def shares() -> list[float]:
            text = cluster.metrics(decode)
            name = "k3_helix_rank_tokens"
            return [metric(text, name, cp=str(rank)) or 0.0 for rank in range(layout.cp)]

        tokens = wait_for(lambda: (found := shares())[0] and found, 20, "a running request")
        assert max(tokens) - min(tokens) <= layout.page
        assert sum(tokens) >= n
        overview = json.loads(get(decode.ops, "/admin/ledger").body)
        (request,) = overview["requests"]
        shown = json.loads(
            get(decode.ops, f"/admin/ledger?request_id={request['request_id']}").body
        )
        assert shown["cp"] == layout.cp
        assert shown["tokens"] == sum(rank["tokens"] for rank in shown["ranks"]) >= n
        share = shown["tokens"] / layout.cp
        page_bytes = layout.page * TOKEN_BYTES
        for rank in shown["ranks"]:
            assert abs(rank["latent_bytes"] - share * TOKEN_BYTES) <= page_bytes
            firsts = [page["first"] // layout.page % layout.cp for page in rank["pages"]]
            assert set(firsts) == {rank["cp"]}
            assert sum(page["tokens"] for page in rank["pages"]) == rank["tokens"]
        assert cluster.gauge(decode, "k3_helix_exchange_bytes_total") > 0
        assert (cluster.gauge(decode, "k3_spec_draft_tokens_total") > 0) == bool(layout.drafter)
    assert get(decode.ops, "/admin/ledger?request_id=nobody").status == 404
    cluster.expect_baseline()
