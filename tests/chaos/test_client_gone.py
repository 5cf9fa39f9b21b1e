"""A client that goes away costs nothing: in every state its pages, slots, rows and places come back."""

import pytest

from tests.chaos.abandoned import Abandoned
from tests.chaos.generation import Generation
from tests.chaos.settings import BUDGET, ENDLESS, LONG, router_flags, slow_flags
from tests.e2e.cluster import Cluster, wait_for

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def cluster(folder):
    with Cluster(
        prefill_flags=slow_flags(folder, *BUDGET),
        decode_flags=slow_flags(folder, "--schedule-max-rows", "1"),
        router_flags=router_flags(folder),
    ) as running:
        yield running


def test_while_decoding(cluster, prompt_of):
    generation = Generation(cluster.url, prompt_of(20), max_tokens=ENDLESS)
    generation.wait_first()
    wait_for(
        lambda: cluster.gauge(cluster.decodes[0], "k3_decode_running") == 1, 10, "a running row"
    )
    generation.leave()
    generation.wait(10)
    assert len(generation.tokens) < ENDLESS
    cluster.expect_baseline()


def test_while_its_prompt_is_computed(cluster, prompt_of):
    client = Abandoned(cluster.url, prompt_of(LONG))
    wait_for(lambda: cluster.gauge(cluster.prefills[0], "k3_prefill_running") == 1, 10, "a prefill")
    client.leave()
    cluster.expect_baseline()


def test_while_its_pages_are_being_pushed(cluster, prompt_of):
    """A transfer is open and chunks are done, whose pages go out while later chunks run."""
    prefill = cluster.prefills[0]
    before = cluster.gauge(prefill, "k3_prefill_tokens_total")

    def is_pushing() -> bool:
        done = cluster.gauge(prefill, "k3_prefill_tokens_total") - before
        return done >= 10 * 16 and cluster.gauge(prefill, "k3_transfer_in_flight") == 1

    client = Abandoned(cluster.url, prompt_of(LONG, seed=1))
    wait_for(is_pushing, 10, "pages on their way")
    assert cluster.gauge(prefill, "k3_prefill_running") == 1, "the prompt is done already"
    client.leave()
    cluster.expect_baseline()


def test_while_queued_behind_another(cluster, prompt_of, truth):
    first = Generation(cluster.url, prompt_of(33), max_tokens=ENDLESS)
    first.wait_first()
    waiting = Abandoned(cluster.url, prompt_of(40))
    decode = cluster.decodes[0]

    def queued() -> bool:
        at_decode = cluster.gauge(decode, "k3_decode_waiting")
        return at_decode + cluster.gauge(cluster.router, "k3_router_queue_depth") >= 1

    wait_for(queued, 10, "a waiting request")
    waiting.leave()
    wait_for(lambda: not queued(), 10, "the queue to forget it")
    first.leave()
    first.wait(10)
    truth(prompt_of(33), first.tokens[:64])
    cluster.expect_baseline()


def test_a_burst_of_leavers_hurts_nobody_who_stays(cluster, prompt_of, truth):
    leavers = [Abandoned(cluster.url, prompt_of(50 + i)) for i in range(8)]
    stays = Generation(cluster.url, prompt_of(77), max_tokens=24)
    for leaver in leavers:
        leaver.leave()
    stays.wait(60)
    assert stays.is_done
    truth(prompt_of(77), stays.tokens)
    cluster.expect_baseline()
