"""One rank of a context-parallel group dies or stops: the group is lost as a whole and comes back, nothing is held."""

import os
import signal

import pytest

from tests.chaos.generation import Generation
from tests.chaos.settings import ENDLESS, flags, router_flags
from tests.e2e.cluster import Cluster, is_alive, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.helix]

BACK_S = 60.0


@pytest.fixture(scope="module")
def cluster(folder):
    with Cluster(
        prefill_flags=flags(folder),
        decode_flags=flags(folder, "--cp", "2"),
        router_flags=router_flags(folder),
    ) as running:
        yield running


@pytest.mark.parametrize(  # an instance may restart its ranks three times in ten minutes
    ("rank", "sig"),
    [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)],
    ids=["last killed", "last stopped", "first killed"],
)
def test_the_group_ends_with_any_of_its_ranks_and_starts_anew(cluster, prompt_of, truth, rank, sig):
    decode = cluster.decodes[0]
    generation = Generation(cluster.url, prompt_of(25), max_tokens=ENDLESS)
    generation.wait_first()
    ranks = cluster.ranks(decode)
    assert len(ranks) == 2
    os.kill(ranks[rank], sig)
    assert generation.join(45), "the request still hangs"
    assert generation.error is not None
    assert not generation.is_done
    truth(prompt_of(25), generation.tokens)
    wait_for(lambda: not any(map(is_alive, ranks)), 20, "both old ranks to be gone")

    def answered() -> Generation | None:
        answer = Generation(cluster.url, prompt_of(37), max_tokens=12).wait(30)
        return answer if answer.is_done else None

    answer = wait_for(answered, BACK_S, "an answer of the new group", poll_s=0.2)
    truth(prompt_of(37), answer.tokens)
    assert not set(cluster.ranks(decode)) & set(ranks)
    cluster.expect_baseline()
