"""The prefix cache through real services: a hit gives the tokens of a plain forward, and nothing else changes.

k3-nano in float64 with random weights: one wrong row or state changes the tokens. States are kept every 32 tokens, so
prompts that share 32, 64, ... tokens with an earlier one continue from each of these places. What a hit is worth to a
drafter is in `test_acceptance.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import grpc.aio
import httpx
import pytest

from k3.types import SamplingParams
from k3.v1 import instance_pb2, instance_pb2_grpc
from tests.e2e.cluster import Cluster, metric
from tests.e2e.nano import nano_folder
from tests.e2e.oracle import Oracle
from tests.e2e.test_exactness import KINDS, Case, flags

pytestmark = [pytest.mark.e2e, pytest.mark.prefill]

PAGE, RUNG, ANSWER = 16, 32, 6
CACHE = (
    "--cache-prefix", "on", "--cache-checkpoint-interval", str(RUNG), "--schedule-token-budget", "96",
    "--cache-checkpoint-rungs", "earliest",
)  # fmt: skip
BASE = tuple(random.Random(3).randrange(256) for _ in range(300))
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return nano_folder(tmp_path_factory.mktemp("model") / "k3-nano")


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


@pytest.fixture(scope="module")
def cluster(folder):
    with Cluster(
        prefill_flags=flags(folder, *CACHE, page=PAGE),
        decode_flags=flags(folder, page=PAGE),
        router_flags=("--model-path", str(folder)),
    ) as running:
        yield running
        running.expect_baseline()


def follow_up(shared: int, own: int, params: SamplingParams = GREEDY, seed: int = 0) -> Case:
    """A prompt of `shared` tokens of the base and `own` ones of its own."""
    rng = random.Random(1000 * shared + seed)
    return Case((*BASE[:shared], *(rng.randrange(256) for _ in range(own))), params)


def expect_right(oracle: Oracle, case: Case, tokens: list[int]) -> None:
    """Token for token what one plain forward gives."""
    truth = [event.id for event in oracle.redraw(case.prompt, tokens, case.params)]
    assert tokens == truth, f"prompt of {len(case.prompt)} tokens, {case.params}"
    assert len(tokens) == ANSWER


async def ask(url: str, cases: list[Case], **more: object) -> list[tuple[list[int], int]]:
    """Tokens and cached prompt tokens of every answer, all asked at once."""

    async def one(client: httpx.AsyncClient, case: Case) -> tuple[list[int], int]:
        answer = await client.post(
            "/v1/completions", json=case.body() | {"max_tokens": ANSWER} | more
        )
        assert answer.status_code == 200, answer.text
        body = answer.json()
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return body["choices"][0]["token_ids"], cached

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await asyncio.gather(*(one(client, case) for case in cases))


def flush(cluster: Cluster) -> dict:
    """Drop the caches of all prefill instances, through the router."""
    answer = httpx.post(f"http://{cluster.admin}/admin/cache/flush")
    assert answer.status_code == 202, answer.text
    (flushed,) = answer.json()
    return flushed


def counter(cluster: Cluster, name: str, **labels: str) -> float:
    return cluster.gauge(cluster.prefills[0], name, **labels)


async def test_a_hit_at_every_rung_gives_the_tokens_of_a_plain_forward(cluster, oracle):
    flush(cluster)
    first, again = Case(BASE, GREEDY), Case(BASE, KINDS[1])
    [(tokens, cached)] = await ask(cluster.url, [first])
    expect_right(oracle, first, tokens)
    assert cached == 0
    hits = counter(cluster, "k3_prefix_hit_tokens_total")
    cases = [
        follow_up(shared + RUNG // 4, 21, KINDS[i % len(KINDS)])
        for i, shared in enumerate(range(RUNG, 289, RUNG))
    ]
    answers = await ask(cluster.url, [*cases, again])
    for case, (tokens, _) in zip([*cases, again], answers, strict=True):
        expect_right(oracle, case, tokens)
    assert [cached for _, cached in answers] == [*range(RUNG, 289, RUNG), 288]
    grown = counter(cluster, "k3_prefix_hit_tokens_total") - hits
    assert grown == sum(cached for _, cached in answers)


async def test_many_readers_share_one_checkpoint(cluster, oracle):
    await ask(cluster.url, [Case(BASE, GREEDY)])
    cases = [follow_up(200, 3 + i, seed=i) for i in range(12)]
    answers = await ask(cluster.url, cases)
    for case, (tokens, cached) in zip(cases, answers, strict=True):
        expect_right(oracle, case, tokens)
        assert cached == 192


async def test_a_flush_forgets_everything_and_running_requests_are_not_hurt(cluster, oracle):
    await ask(cluster.url, [Case(BASE, GREEDY)])
    running = asyncio.create_task(ask(cluster.url, [follow_up(200, 90, seed=i) for i in range(5)]))
    flushed = await asyncio.to_thread(flush, cluster)
    assert flushed["pages"] >= 18
    assert flushed["checkpoints"] >= 9
    for i, (tokens, _) in enumerate(await running):
        expect_right(oracle, follow_up(200, 90, seed=i), tokens)
    flush(cluster)
    assert counter(cluster, "k3_state_slots", state="checkpoint") == 0
    assert counter(cluster, "k3_kv_pages", state="cached") == 0
    [(_, cached)] = await ask(cluster.url, [Case(BASE, GREEDY)])
    assert cached == 0


async def test_salts_keep_caches_apart(cluster, oracle):
    flush(cluster)
    case = Case(BASE[:100], GREEDY)
    seen = []
    for salt in ("a", "a", "b", None, None):
        [(tokens, cached)] = await ask(cluster.url, [case], cache_salt=salt)
        expect_right(oracle, case, tokens)
        seen.append(cached)
    assert seen == [0, 96, 0, 0, 96]


async def test_the_eighth_turn_of_a_conversation_computes_a_fifth_of_its_prompt_at_most(
    cluster, oracle
):
    """Every turn continues from the last page boundary of the one before: it pays for what is new."""
    flush(cluster)
    rng, prompt = random.Random(8), list[int]()
    for turn in range(8):
        prompt += [rng.randrange(256) for _ in range(61)]
        before = counter(cluster, "k3_prefill_tokens_total")
        case = Case(tuple(prompt), GREEDY)
        [(tokens, cached)] = await ask(cluster.url, [case])
        expect_right(oracle, case, tokens)
        computed = counter(cluster, "k3_prefill_tokens_total") - before
        assert computed == len(prompt) - cached
        assert computed <= 61 + ANSWER + PAGE, f"turn {turn}"
        prompt += tokens
    assert computed < 0.2 * len(case.prompt)


async def test_a_watcher_sees_what_comes_and_goes(cluster):
    """A snapshot first, then every event, by numbers without a gap; a flush clears."""
    flush(cluster)
    await ask(cluster.url, [Case(BASE[:100], GREEDY)])
    pages, checkpoints, seq = set[bytes](), set[bytes](), -1
    async with grpc.aio.insecure_channel(cluster.prefills[0].address) as channel:
        watch = instance_pb2_grpc.InstanceServiceStub(channel).Watch(instance_pb2.WatchRequest())

        async def follow(until: Callable[[], bool]) -> None:
            nonlocal seq
            async with asyncio.timeout(60.0):
                while not until():
                    message = await watch.read()
                    if message.HasField("cache_snapshot"):
                        snapshot = message.cache_snapshot
                        assert snapshot.first == (seq == -1)
                        pages.update(snapshot.pages)
                        checkpoints.update(snapshot.checkpoints)
                        seq = snapshot.seq
                    for event in message.cache_events:
                        seq += 1
                        assert event.seq == seq
                        pages.update(event.stored.hashes)
                        checkpoints.update(event.stored.checkpoints)
                        pages.difference_update(event.removed.hashes)
                        checkpoints.difference_update(event.removed.checkpoints)
                        if event.HasField("cleared"):
                            pages.clear()
                            checkpoints.clear()

        await follow(lambda: len(pages) == 6 and len(checkpoints) == 3)
        await ask(cluster.url, [Case(BASE, GREEDY)])
        await follow(lambda: len(pages) == 18)
        await follow(lambda: len(checkpoints) == 9)
        flush(cluster)
        await follow(lambda: not pages)
        watch.cancel()


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(cluster, oracle):
    """Prompts that hit and miss, cancelled while they wait, compute, are pushed or decode."""
    rng = random.Random(5)
    await ask(cluster.url, [Case(BASE, GREEDY)])

    async def leave(i: int) -> None:
        try:
            async with asyncio.timeout(rng.choice((0.01, 0.03, 0.06, 0.12, 0.3))):
                await ask(
                    cluster.url, [follow_up(rng.choice((40, 200, 296)), 150, seed=i)], max_tokens=60
                )
        except TimeoutError:
            pass

    for wave in range(3):
        await asyncio.gather(*(leave(10 * wave + i) for i in range(8)))
    await asyncio.to_thread(cluster.expect_baseline)
    [(tokens, cached)] = await ask(cluster.url, [case := follow_up(296, 5)])
    expect_right(oracle, case, tokens)
    assert cached == 288


@pytest.mark.parametrize(
    ("mode", "layout", "decode_layout"),
    [("fork_at_schedule", ("--parallel-pp", "2"), ()), ("copy", (), ("--parallel-cp", "2"))],
    ids=["fork_at_schedule-pp2", "copy-cp2"],
)
def test_tokens_stay_right_while_pages_and_states_are_evicted(
    folder, oracle, mode, layout, decode_layout
):
    """Pages for two of the longest prompts, and fewer checkpoints than rungs; prompts of one family come and go."""
    small = (
        "--cache-pages", "48", "--model-max-model-len", "360",
        "--schedule-max-rows", "4", "--cache-state-slots", "9", "--cache-checkpoint-mode", mode, *layout,
    )  # fmt: skip
    with Cluster(
        prefill_flags=flags(folder, *CACHE, *small, page=PAGE),
        decode_flags=flags(folder, "--model-max-model-len", "360", *decode_layout, page=PAGE),
        router_flags=("--model-path", str(folder)),
    ) as cluster:
        rng = random.Random(11)
        for _ in range(3):
            cases = [
                follow_up(
                    rng.choice((0, 50, 130, 260, 300)), rng.randrange(1, 40), seed=rng.randrange(3)
                )
                for _ in range(8)
            ]
            for case, (tokens, _) in zip(cases, asyncio.run(ask(cluster.url, cases)), strict=True):
                expect_right(oracle, case, tokens)
        text = cluster.metrics(cluster.prefills[0])
        assert (metric(text, "k3_prefix_hit_tokens_total") or 0) > 0
        gone = [metric(text, f"k3_state_ckpt_{how}_total") or 0 for how in ("evicted", "orphaned")]
        assert sum(gone) > 0
        cluster.expect_baseline()
