"""No room, no fit: refused at once and clearly, nobody else hurt."""

import json

import httpx
import pytest

from tests.chaos.generation import Generation
from tests.chaos.settings import ENDLESS, flags, router_flags
from tests.e2e.cluster import Cluster, wait_for

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def cluster(folder):
    small = ("--schedule-max-rows", "1", "--schedule-max-queue", "1")
    with Cluster(
        prefill_flags=flags(folder),
        decode_flags=flags(folder, *small),
        router_flags=router_flags(folder, "--admission-max-queue", "1"),
    ) as running:
        yield running


def test_a_full_queue_answers_at_once(cluster, prompt_of, truth):
    running = Generation(cluster.url, prompt_of(18), max_tokens=ENDLESS)
    running.wait_first()
    # One may wait at the instance, one at the router.
    others = [Generation(cluster.url, prompt_of(20 + i), max_tokens=4) for i in range(3)]
    full = wait_for(
        lambda: next((o for o in others if o.status == 429 and o.body), None), 20, "a refusal"
    )
    assert json.loads(full.body)["error"]["type"] == "rate_limit_error"
    assert 1 <= int(full.headers["retry-after"]) <= 60
    running.leave()
    running.wait(10)
    truth(prompt_of(18), running.tokens[:32])
    for one in others:
        one.wait(30)
        assert one.is_done or one.status == 429
    cluster.expect_baseline()


def test_a_prompt_that_can_never_fit_is_the_clients_error(cluster):
    too_long = {"prompt": [1] * 200_000, "max_tokens": 1}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=too_long, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    cluster.expect_baseline()


def test_a_prompt_within_the_context_but_beyond_the_pools_is_refused(folder, prompt_of, truth):
    """256 tokens of pages, a context of thousands: no waiting could ever help."""
    few = ("--cache-pages", "16")
    with Cluster(
        prefill_flags=flags(folder, *few),
        decode_flags=flags(folder, *few),
        router_flags=router_flags(folder),
    ) as cluster:
        body = {"prompt": prompt_of(400), "max_tokens": 4}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 400, answer.text
        fits = Generation(cluster.url, prompt_of(100), max_tokens=8).wait(30)
        truth(prompt_of(100), fits.tokens)
        cluster.expect_baseline()
