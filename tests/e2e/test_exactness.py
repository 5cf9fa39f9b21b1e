"""Served tokens equal a one-process, no-cache forward, token for token, in float64.

The prompts sit on and around page and chunk boundaries. Every answer is drawn once with all others at the same time,
and once with so few pages and slots that most requests have to wait; one of every kind of sampling is drawn alone too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import pytest

from k3.types import LogprobParams, SamplingParams
from tests.e2e.cluster import Cluster, metric
from tests.e2e.nano import nano_folder
from tests.e2e.oracle import Oracle

pytestmark = pytest.mark.e2e

PAGE = 8
LENGTHS = (
    1, 2, 3, 5, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE + 7, 63, 64, 65, 100,
    127, 128, 129, 200, 255, 256, 300, 511, 600,
)  # fmt: skip
ANSWER = 12  # crosses a page boundary whatever the prompt
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=-5),
    SamplingParams(temperature=1.3, min_p=0.05, seed=2**40, presence_penalty=0.5),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(temperature=0.9, seed=3, logit_bias={7: 4.0, 9: -100.0}),
)


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    params: SamplingParams

    def body(self) -> dict[str, object]:
        p = self.params
        return {
            "prompt": list(self.prompt),
            "max_tokens": ANSWER,
            "temperature": p.temperature,
            "top_p": p.top_p,
            "top_k": p.top_k,
            "min_p": p.min_p,
            "presence_penalty": p.presence_penalty,
            "frequency_penalty": p.frequency_penalty,
            "repetition_penalty": p.repetition_penalty,
            "logit_bias": {str(i): b for i, b in p.logit_bias.items()},
            "seed": p.seed,
            "ignore_eos": True,
            "return_token_ids": True,
        }


def cases() -> tuple[Case, ...]:
    rng = random.Random(7)
    return tuple(
        Case(tuple(rng.randrange(256) for _ in range(n)), KINDS[i % len(KINDS)])
        for i, n in enumerate(LENGTHS)
    )


CASES = cases()
ALONE = (*CASES[::5], CASES[1])  # of every kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return nano_folder(tmp_path_factory.mktemp("model") / "k3-nano")


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


def flags(folder, *more: str, page: int = PAGE) -> tuple[str, ...]:
    return (
        "--model-path", str(folder), "--model-dtype", "float64", "--cache-page-tokens", str(page),
        "--cache-fill-nan", "true", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cluster(folder):
    chunked = (
        "--schedule-token-budget",
        "96",
    )  # several chunks per long prompt, several prompts per step
    with Cluster(
        prefill_flags=flags(folder, *chunked),
        decode_flags=flags(folder),
        router_flags=("--model-path", str(folder)),
    ) as running:
        yield running
        running.expect_baseline()


async def complete(client: httpx.AsyncClient, case: Case, **more: object) -> dict:
    answer = await client.post("/v1/completions", json=case.body() | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


async def all_at_once(url: str, cases: Sequence[Case] = CASES) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        choices = await asyncio.gather(*(complete(client, case) for case in cases))
    return [choice["token_ids"] for choice in choices]


def expect_truth(oracle: Oracle, case: Case, tokens: list[int]) -> None:
    assert len(tokens) == ANSWER
    truth = [event.id for event in oracle.redraw(case.prompt, tokens, case.params)]
    first = next((i for i, (a, b) in enumerate(zip(tokens, truth, strict=True)) if a != b), None)
    assert first is None, (
        f"prompt of {len(case.prompt)} tokens, {case.params}: token {first} is {tokens[first]}, "
        f"should be {truth[first]}"
    )


async def test_a_prompt_alone_gives_the_tokens_of_a_plain_forward(cluster, oracle):
    assert len({KINDS.index(case.params) for case in ALONE}) == len(KINDS)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        for case in ALONE:
            choice = await complete(client, case)
            assert choice["finish_reason"] == "length"
            expect_truth(oracle, case, choice["token_ids"])


async def test_all_prompts_at_once_give_the_same_tokens(cluster, oracle):
    for case, tokens in zip(CASES, await all_at_once(cluster.url), strict=True):
        expect_truth(oracle, case, tokens)


def n_waited(text: str, histogram: str) -> float:
    """Requests that were not let in within the millisecond of the smallest bucket."""
    n_all = metric(text, f"{histogram}_count") or 0.0
    return n_all - (metric(text, f"{histogram}_bucket", le="0.001") or 0.0)


async def test_tokens_do_not_depend_on_waiting_for_pages_and_slots(folder, oracle):
    """Pages for little more than the longest request, three rows: most requests queue, at the router or at decode."""
    pages = str((max(LENGTHS) + ANSWER) // PAGE + 6)
    tight = ("--cache-pages", pages, "--schedule-max-rows", "3", "--schedule-max-queue", "32")
    with Cluster(
        prefill_flags=flags(folder, *tight, "--schedule-token-budget", "64"),
        decode_flags=flags(folder, *tight),
        router_flags=("--model-path", str(folder)),
    ) as cluster:
        answers = await all_at_once(cluster.url)
        async with httpx.AsyncClient(timeout=60) as client:
            router = (await client.get(f"{cluster.url}/metrics")).text
        decode = cluster.metrics(cluster.decodes[0])
        waited = n_waited(router, "k3_router_queue_seconds")
        waited += n_waited(decode, "k3_decode_queue_wait_seconds")
        assert waited >= len(CASES) // 2
        for case, tokens in zip(CASES, answers, strict=True):
            expect_truth(oracle, case, tokens)
        cluster.expect_baseline()


async def test_log_probabilities_equal_the_plain_forward(cluster, oracle):
    case = CASES[10]
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        choice = await complete(client, case, logprobs=5)
    expect_truth(oracle, case, choice["token_ids"])
    truth = oracle.redraw(case.prompt, choice["token_ids"], case.params, LogprobParams(True, 5))
    served = choice["logprobs"]["token_logprobs"]
    assert served == pytest.approx([event.logprob for event in truth], abs=1e-5)


async def test_streaming_sends_the_tokens_of_the_whole_answer(cluster):
    case = CASES[13]
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        whole = await complete(client, case)
        ids: list[int] = []
        body = case.body() | {"stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = [line async for line in stream.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        chunk = httpx.Response(200, content=line.removeprefix("data: ")).json()
        for choice in chunk["choices"]:
            ids += choice.get("token_ids") or []
    assert ids == whole["token_ids"]
