"""Pairs that do not fit, and transfers that stall: refused by name, or fenced until no write can land any more."""

import os
import signal

import grpc
import httpx
import pytest

from k3.v1 import prefill_pb2, prefill_pb2_grpc
from tests.chaos.generation import Generation
from tests.chaos.settings import BUDGET, LONG, PAGE, flags, router_flags, slow_flags
from tests.e2e.cluster import Cluster, wait_for

pytestmark = pytest.mark.chaos


def test_a_pair_with_different_layouts_never_serves_and_says_why(folder, prompt_of):
    other = ("--cache-page-tokens", "32")
    cluster = Cluster(
        prefill_flags=(*flags(folder), *other),
        decode_flags=flags(folder),
        router_flags=router_flags(folder),
        start_deadline_s=8,
    )
    try:
        cluster.start(30, should_stop=lambda: cluster_engines_ready(cluster))
        body = {"prompt": prompt_of(10), "max_tokens": 2}

        def said_why() -> bool:
            answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 503
            return any("layouts" in line for name, line in cluster.logs if name == "router")

        wait_for(said_why, 30, "the router's line about the unfit pair")
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["error"]["code"] == "no_prefill_available"
    finally:
        cluster.stop()


def cluster_engines_ready(cluster: Cluster) -> bool:
    engines = [*cluster.prefills, *cluster.decodes]
    return all(cluster.is_ready(m) for m in engines) and not cluster.is_ready(cluster.router)


@pytest.fixture(scope="module")
def cluster(folder):
    """A real asynchronous wire: without it, memory of this host is copied inside the post."""
    with Cluster(
        prefill_flags=slow_flags(folder, *BUDGET),
        decode_flags=slow_flags(folder),
        router_flags=router_flags(folder),
        env={"UCX_TLS": "self,tcp", "UCX_NET_DEVICES": "lo"},
    ) as running:
        yield running


def test_tokens_are_right_over_tcp(cluster, prompt_of, truth):
    generation = Generation(cluster.url, prompt_of(333), max_tokens=16).wait(60)
    assert generation.is_done
    truth(prompt_of(333), generation.tokens)
    cluster.expect_baseline()


def test_pages_of_a_stalled_transfer_stay_fenced_until_quiet(cluster, prompt_of, truth):
    """The sending rank stops in the middle: decode keeps the destination until its writer is known to be gone."""
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    generation = Generation(cluster.url, prompt_of(LONG), max_tokens=8)
    wait_for(lambda: cluster.gauge(prefill, "k3_prefill_running") == 1, 10, "a prefill")
    os.kill(cluster.ranks(prefill)[0], signal.SIGSTOP)
    fenced = wait_for(
        lambda: cluster.gauge(decode, "k3_kv_pages", state="quarantined"), 40, "quarantined pages"
    )
    assert fenced >= LONG // PAGE
    generation.wait(60)
    wait_for(
        lambda: cluster.gauge(decode, "k3_kv_pages", state="quarantined") == 0, 60, "proof of quiet"
    )

    def answered() -> Generation | None:
        one = Generation(cluster.url, prompt_of(50), max_tokens=8).wait(30)
        return one if one.is_done else None

    truth(prompt_of(50), wait_for(answered, 60, "an answer after the stall", poll_s=0.2).tokens)
    cluster.expect_baseline()


def test_prefill_keeps_no_state_for_transfers_it_never_saw(cluster):
    with grpc.insecure_channel(cluster.prefills[0].address) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        request = prefill_pb2.QuiesceRequest(
            proto_version=1, instance_id="nobody", prefill_instance_id="other", transfer_ids=[1, 2]
        )
        answer = stub.Quiesce(request, timeout=10)
        assert len(answer.states) == 2
        assert prefill_pb2.QUIESCE_STATE_QUIESCED not in answer.states, "another instance was asked"
    cluster.expect_baseline()


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (prefill_pb2.PrefillRequest(received=prefill_pb2.Received()), "INVALID_ARGUMENT"),
        (
            prefill_pb2.PrefillRequest(
                start=prefill_pb2.Start(
                    proto_version=1, instance_id="stranger", request_id="r", token_ids=[1, 2]
                )
            ),
            "FAILED_PRECONDITION",
        ),
        (
            prefill_pb2.PrefillRequest(
                start=prefill_pb2.Start(
                    proto_version=99, instance_id="stranger", request_id="r", token_ids=[1]
                )
            ),
            "FAILED_PRECONDITION",
        ),
    ],
    ids=["no start", "unknown peer", "other protocol"],
)
def test_a_foreign_stream_is_refused_before_any_work(cluster, first, status):
    with grpc.insecure_channel(cluster.prefills[0].address) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Prefill(iter([first]), timeout=10))
    assert refused.value.code().name == status
    cluster.expect_baseline()
