"""What drafts of the shipped drafter are worth through real services: as much as in one process, whatever the batch.

k3-mini and its trained MLA drafter, with rings so short that every answer runs past their wrap. Every prompt is asked
when no cache knows it and again when one does. The yardstick is one process without a hand-over, on the same prompts
with the same window: with drafts, without rows for the drafter to start from, and without drafts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from k3.bench.speculation import Acceptance
from k3.config.resolve import EMBEDDED_MODEL
from k3.model.dspark_spec import DraftSpec, ring_places
from k3.types import SamplingParams
from router.text.folder import load_model_folder
from tests.drafters import LocalEngine
from tests.e2e.cluster import Cluster, metric
from tests.e2e.nano import ROOT
from tests.model_runner import solo_stage

pytestmark = [pytest.mark.e2e, pytest.mark.dspark, pytest.mark.prefill]

N_ITEMS, LIMIT, WINDOW, DRAFTS, PAGE = 16, 64, 64, 7, 16
N_LEAVING, N_ALONE = 2, 2
FEWER = (0, 2, 5)  # drafts that single requests want at most
HEARD_BEFORE_LEAVING = 4  # the role, prefill's token, two steps of decode
OWN = ("--drafter", "draft-mla")
CACHE = (
    "--cache-prefix", "on", "--cache-checkpoint-interval", "32", "--cache-state-slots", "128",
)  # fmt: skip
SPECULATE = (
    *OWN, "--max-rows", str(N_ITEMS), "--draft-tokens", str(DRAFTS), "--spec-draft-window", str(WINDOW),
)  # fmt: skip


def questions() -> list[dict[str, Any]]:
    lines = (ROOT / "k3/assets/eval/arith_forms.jsonl").read_text().splitlines()
    chosen = lines[:: len(lines) // N_ITEMS][:N_ITEMS]
    return [
        {
            "messages": json.loads(line)["turns"],
            "max_tokens": LIMIT,
            "temperature": 0,
            "return_token_ids": True,
            "return_spec_stats": True,
        }
        for line in chosen
    ]


QUESTIONS = questions()


@dataclass(frozen=True)
class Answered:
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    acceptance: Acceptance | None
    cached: int = 0  # tokens of the prompt that were found in a cache


async def one(client: httpx.AsyncClient, question: dict[str, Any]) -> Answered:
    response = await client.post("/v1/chat/completions", json=question)
    assert response.status_code == 200, response.text
    body = response.json()
    ids = body["choices"][0]["token_ids"]
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    prompt = tuple(body["prompt_token_ids"])
    return Answered(prompt, tuple(ids), Acceptance.of_body(body), cached)


async def leave(client: httpx.AsyncClient, question: dict[str, Any]) -> None:
    """Ask, and hang up when decode has begun: the first token is prefill's, and needs no row."""
    n_heard = 0
    async with client.stream(
        "POST", "/v1/chat/completions", json=question | {"stream": True}
    ) as response:
        async for line in response.aiter_lines():
            n_heard += line.startswith("data: ")
            if n_heard == HEARD_BEFORE_LEAVING:
                return
    raise AssertionError("the answer ended before we could leave")


def ask(cluster: Cluster, questions: Sequence[dict[str, Any]], n_leaving: int) -> list[Answered]:
    """All at once; the first `n_leaving` clients hang up half-way and ask again."""

    async def go(client: httpx.AsyncClient, i: int) -> Answered:
        if i < n_leaving:
            await leave(client, questions[i])
        return await one(client, questions[i])

    async def everybody() -> list[Answered]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=240) as client:
            return await asyncio.gather(*(go(client, i) for i in range(len(questions))))

    return asyncio.run(everybody())


def length(answered: Sequence[Answered]) -> float:
    """Tokens per step over all answers."""
    total = Acceptance.none(DRAFTS)
    for a in answered:
        assert a.acceptance is not None
        total = total.plus(a.acceptance)
    return total.length


class OneProcess:
    """The same prompts through one stage, context rows written straight into the rings."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompts = prompts
        self.drafter = EMBEDDED_MODEL / "draft-mla"
        self.ends = tuple(load_model_folder(EMBEDDED_MODEL, "k3-mini").eos_token_ids)
        taps = DraftSpec.from_folder(self.drafter).taps
        self.stage = solo_stage(EMBEDDED_MODEL, "float32", taps=taps)

    def __call__(self, *, drafts: int = DRAFTS, hand_over: bool = True) -> list[Answered]:
        engine = LocalEngine(
            self.stage,
            len(self.prompts),
            max(map(len, self.prompts)) + LIMIT,
            drafter=self.drafter if drafts else None,
            draft_tokens=drafts,
            window=WINDOW,
            page_tokens=PAGE,
            dtype="float32",
        )
        greedy = [SamplingParams(temperature=0.0)] * len(self.prompts)
        answers = engine.generate(
            self.prompts, LIMIT, greedy, chunk=256, hand_over=hand_over, end_ids=self.ends
        )
        return [
            Answered(
                tuple(prompt),
                tuple(answer.ids),
                Acceptance(tuple(answer.accepted.count(j) for j in range(DRAFTS + 1))),
            )
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]


@dataclass(frozen=True)
class Served:
    """The first questions one after the other, then all at once with some that leave and come back; both again."""

    alone: list[Answered]
    together: list[Answered]
    alone_again: list[Answered]
    together_again: list[Answered]
    limited: list[Answered]  # the first questions with at most FEWER drafts

    @property
    def found(self) -> list[Answered]:
        """Whose prompts were in the cache."""
        return [*self.together_again, *self.alone_again]


@pytest.fixture(scope="module")
def served() -> Served:
    def one_by_one(cluster: Cluster) -> list[Answered]:
        return [ask(cluster, [question], 0)[0] for question in QUESTIONS[:N_ALONE]]

    with Cluster(prefill_flags=(*OWN, *CACHE), decode_flags=SPECULATE) as cluster:
        alone = one_by_one(cluster)
        httpx.post(f"http://{cluster.admin}/admin/cache/flush").raise_for_status()
        together = ask(cluster, QUESTIONS, N_LEAVING)
        again, together_again = one_by_one(cluster), ask(cluster, QUESTIONS, 0)
        fewer = [q | {"draft_tokens": n} for q, n in zip(QUESTIONS, FEWER, strict=False)]
        served = Served(alone, together, again, together_again, ask(cluster, fewer, 0))
        cluster.expect_baseline()
        n_asked = 2 * (N_ALONE + N_ITEMS) + N_LEAVING + len(FEWER)
        text = cluster.metrics(cluster.decodes[0])
        assert metric(text, "k3_draft_bootstrap_total", kind="transferred") == n_asked
    return served


@pytest.fixture(scope="module")
def one_process(served) -> OneProcess:
    return OneProcess([answered.prompt for answered in served.together])


@pytest.fixture(scope="module")
def local(one_process) -> list[Answered]:
    return one_process()


def test_answers_are_those_of_plain_decoding(served, one_process, local) -> None:
    ids = [answered.ids for answered in one_process(drafts=0)]
    for everybody in (served.together, served.together_again, local):
        assert [a.ids for a in everybody] == ids
    for few in (served.alone, served.alone_again):
        assert [a.ids for a in few] == ids[:N_ALONE]


def test_a_drafter_without_rows_from_prefill_is_visibly_worse(served, one_process) -> None:
    warm, blind = length(served.together), length(one_process(hand_over=False))
    assert blind < 0.8 * warm, f"tokens per step {warm:.3f}, without rows {blind:.3f}"


def test_every_answer_runs_past_the_wrap_of_its_ring(served) -> None:
    rows = PAGE * ring_places(WINDOW, 1 + DRAFTS, PAGE)
    for answered in served.together:
        assert len(answered.prompt) + len(answered.ids) > rows


def test_one_request_is_drafted_as_well_as_in_one_process(served, local) -> None:
    assert not any(answered.cached for answered in served.alone[:1])
    assert length(served.alone) == pytest.approx(length(local[:N_ALONE]), rel=0.01)


def test_sixteen_at_once_are_drafted_as_well_as_in_one_process(served, local) -> None:
    """Those that came back into somebody's row and ring included, and on their own."""
    assert length(served.together) == pytest.approx(length(local), rel=0.01)
    back = length(served.together[:N_LEAVING])
    assert back == pytest.approx(length(local[:N_LEAVING]), rel=0.01)


def test_prompts_found_in_a_cache_are_drafted_as_well_as_in_one_process(served, local) -> None:
    """Draft rows lie in the pages that are found: a drafter that lacked them would be blind."""
    cached = [answered.cached for answered in served.found]
    assert min(cached) > 0, cached
    assert all(n % PAGE == 0 for n in cached), cached
    assert length(served.together_again) == pytest.approx(length(local), rel=0.01)
    assert length(served.alone_again) == pytest.approx(length(local[:N_ALONE]), rel=0.01)


def test_requests_that_want_fewer_drafts_get_the_same_tokens(served) -> None:
    for most, asked, before in zip(FEWER, served.limited, served.together, strict=False):
        assert asked.ids == before.ids
        assert asked.acceptance is not None
        accepted = [j for j, n in enumerate(asked.acceptance.histogram) if n]
        assert max(accepted, default=0) == most, asked.acceptance


def test_statistics_of_an_answer_add_up(served) -> None:
    for answered in served.together:
        assert answered.acceptance is not None
        histogram = answered.acceptance.histogram
        assert len(histogram) == DRAFTS + 1
        n_emitted = sum((j + 1) * n for j, n in enumerate(histogram))
        n_after_first = len(answered.ids) - 1
        assert n_after_first <= n_emitted <= n_after_first + DRAFTS
