"""A stage of a prefill pipeline dies or stops with plans in flight: its requests go to the other instance."""

import os
import signal

import pytest

from tests.chaos.generation import Generation
from tests.chaos.settings import BUDGET, LONG, router_flags, slow_flags
from tests.e2e.cluster import Cluster, is_alive, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.prefill]

STAGES = ("--pp", "2", *BUDGET, "--schedule-plan-timeout-s", "15")
BACK_S = 60.0


@pytest.fixture(scope="module")
def cluster(folder):
    with Cluster(
        n_prefills=2,
        prefill_flags=slow_flags(folder, *STAGES),
        decode_flags=slow_flags(folder),
        router_flags=router_flags(folder),
    ) as running:
        yield running


@pytest.mark.parametrize(
    ("stage", "sig"),
    [(1, signal.SIGKILL), (0, signal.SIGSTOP)],
    ids=["last killed", "first stopped"],
)
def test_prompts_in_flight_move_to_the_other_instance(cluster, prompt_of, truth, stage, sig):
    router = cluster.router
    wait_for(
        lambda: (
            cluster.gauge(router, "k3_router_instance_up", instance_role="prefill") == 2
            and cluster.gauge(router, "k3_router_circuit_state") == 0
        ),
        BACK_S,
        "the router to send requests to both prefills",
    )
    prompts = [prompt_of(LONG, seed) for seed in (stage, 7 + stage)]
    generations = [Generation(cluster.url, prompt, max_tokens=12) for prompt in prompts]

    def busy():
        """Whichever computes one, once both are there: on one instance each, or one behind the other."""
        running = [cluster.gauge(p, "k3_prefill_running") for p in cluster.prefills]
        waiting = [cluster.gauge(p, "k3_prefill_waiting") for p in cluster.prefills]
        return sum(running) + sum(waiting) == 2 and cluster.prefills[running[1] > running[0]]

    victim = wait_for(busy, 20, "both prompts being computed")
    ranks = cluster.ranks(victim)
    assert len(ranks) == 2
    os.kill(ranks[stage], sig)
    for prompt, generation in zip(prompts, generations, strict=True):
        generation.wait(120)
        assert generation.is_done, generation.error or generation.body
        truth(prompt, generation.tokens)
    wait_for(lambda: not any(map(is_alive, ranks)), 20, "both old stages to be gone")
    wait_for(lambda: cluster.is_ready(victim), BACK_S, "new stages", poll_s=0.2)
    assert not set(cluster.ranks(victim)) & set(ranks)
    cluster.expect_baseline(40)  # the fenced reservation leaves quarantine
