"""The prefill service with its real ranks, real gRPC and real NIXL, against a peer that only has memory.

Model: k3-nano of golden/k3 in float64; `decode_ids[0]` of its cases is the first greedy token.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from torch import Tensor

from k3.errors import ReconnectRequired
from k3.rpc.status import from_rpc_error
from k3.v1 import common_pb2, prefill_pb2
from prefill_svc.deployment import Deployment
from tests.e2e.prefill_peer import Call, Peer
from tests.e2e.prefill_running import GOLDEN, P, Service, config, serving

pytestmark = [pytest.mark.e2e, pytest.mark.prefill, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[(1, 1), (2, 2)], ids=["solo", "pp2xtp2"]
)
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    async with serving(*request.param) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def peer(service: Service) -> AsyncIterator[Peer]:
    deployment = Deployment.of(config(), "digest")
    peer = Peer.open(deployment.spec, deployment.layout, page_tokens=P, dtype="float64", n_pages=40)
    await service.stub.Connect(peer.connect_request())
    yield peer
    assert await service.is_at_baseline()
    peer.close()


@pytest.fixture(scope="module")
def cases() -> dict[str, Tensor]:
    return load_file(GOLDEN / "cases.safetensors")


def check_caches(
    peer: Peer, cases: dict[str, Tensor], case: str, pages: list[int], slot: int
) -> None:
    """What arrived equals the published states; rows beyond the prompt are zero."""
    n = len(cases[f"{case}.input_ids"])
    caches = peer.storage.caches()
    for layer, latents in caches.latents.items():
        rows = torch.cat([latents[page] for page in pages])
        expected = cases[f"{case}.layer{layer}.mla_latent"].double()
        torch.testing.assert_close(rows[:n], expected, atol=1e-3, rtol=0)
        assert (rows[n:] == 0).all()
    for layer, states in caches.states.items():
        expected = cases[f"{case}.layer{layer}.kda_state"].double()
        torch.testing.assert_close(states[slot], expected, atol=1e-3, rtol=0)


async def test_a_prompt_is_computed_and_lands_in_the_peers_memory(
    service: Service, peer: Peer, cases: dict[str, Tensor]
) -> None:
    ids = cases["case2.input_ids"].tolist()
    pages = list(range(30, 30 - (len(ids) + P - 1) // P, -1))
    call = Call(service.stub)
    await call.say(start=peer.start(ids))
    await call.say(destination=peer.destination(pages, state_slot=5))
    accepted = (await call.next("accepted")).accepted
    geometry = service.engine.describe().geometry
    assert list(accepted.expected_senders) == [geometry.pp * geometry.tp]
    prefilled = (await call.next("prefilled")).prefilled
    assert prefilled.token.id == cases["case2.decode_ids"][0].item()
    assert prefilled.prompt_tokens == len(ids)
    committed = (await call.next("committed")).committed
    await peer.records_of(committed)
    await asyncio.to_thread(check_caches, peer, cases, "case2", pages, 5)
    await call.say(received=prefill_pb2.Received(generation=1))
    await call.expect()


async def test_a_destination_that_comes_after_the_first_token_gets_everything(
    service: Service, peer: Peer, cases: dict[str, Tensor]
) -> None:
    ids = cases["case0.input_ids"].tolist()
    call = Call(service.stub)
    await call.say(start=peer.start(ids))
    prefilled = (await call.next("prefilled")).prefilled
    assert prefilled.token.id == cases["case0.decode_ids"][0].item()
    pages = [3, 1, 4, 7, 5]
    await call.say(destination=peer.destination(pages, state_slot=2))
    committed = (await call.next("committed")).committed
    await peer.records_of(committed)
    await asyncio.to_thread(check_caches, peer, cases, "case0", pages, 2)
    await call.say(received=prefill_pb2.Received(generation=1))
    await call.expect()


async def test_many_prompts_at_once_get_their_own_tokens(
    service: Service, peer: Peer, cases: dict[str, Tensor]
) -> None:
    async def one(case: str, first_page: int, slot: int) -> None:
        ids = cases[f"{case}.input_ids"].tolist()
        pages = list(range(first_page, first_page + (len(ids) + P - 1) // P))
        call = Call(service.stub)
        await call.say(start=peer.start(ids))
        await call.say(destination=peer.destination(pages, state_slot=slot))
        prefilled = (await call.next("prefilled")).prefilled
        assert prefilled.token.id == cases[f"{case}.decode_ids"][0].item()
        await peer.records_of((await call.next("committed")).committed)
        await asyncio.to_thread(check_caches, peer, cases, case, pages, slot)
        await call.say(received=prefill_pb2.Received(generation=1))
        await call.expect()

    await asyncio.gather(
        one("case0", 0, 0), one("case1", 5, 1), one("case2", 6, 2), one("case0", 24, 3)
    )


async def test_an_abort_is_answered_by_quiesced_and_the_stream_ends_well(
    service: Service, peer: Peer, cases: dict[str, Tensor]
) -> None:
    call = Call(service.stub)
    await call.say(start=peer.start(cases["case2.input_ids"].tolist()))
    await call.say(destination=peer.destination(list(range(17)), state_slot=0))
    await call.next("accepted")
    await call.say(abort=prefill_pb2.Abort(generation=1, reason=prefill_pb2.ABORT_REASON_CLIENT))
    quiesced = (await call.next("quiesced")).quiesced
    assert quiesced.generation == 1
    await call.expect()


async def test_a_lost_stream_is_proven_quiet_by_the_unary_call(
    service: Service, peer: Peer, cases: dict[str, Tensor]
) -> None:
    destination = peer.destination(list(range(17)), state_slot=0)
    call = Call(service.stub)
    await call.say(start=peer.start(cases["case2.input_ids"].tolist()))
    await call.say(destination=destination)
    await call.next("accepted")
    call.cancel()
    request = prefill_pb2.QuiesceRequest(
        proto_version=1,
        instance_id=peer.instance_id,
        prefill_instance_id=service.engine.describe().instance_id,
        transfer_ids=[destination.transfer_id, 12345],
    )
    async with asyncio.timeout(10.0):
        while True:
            answer = await service.stub.Quiesce(request)
            if answer.states[0] == prefill_pb2.QUIESCE_STATE_QUIESCED:
                break
            await asyncio.sleep(0.01)
    assert answer.instance_id == request.prefill_instance_id
    assert answer.states[1] == prefill_pb2.QUIESCE_STATE_QUIESCED


async def test_without_a_destination_the_pages_are_kept_for_reserve_wait_only(
    service: Service, peer: Peer
) -> None:
    call = Call(service.stub)
    await call.say(start=peer.start([5, 6, 7]))
    await call.next("prefilled")
    assert service.engine.load().pages_pinned == 1
    await call.expect(grpc.StatusCode.RESOURCE_EXHAUSTED)


async def test_a_silent_peer_is_fenced(service: Service, peer: Peer) -> None:
    call = Call(service.stub)
    call.does_echo = False
    await call.say(start=peer.start([5, 6, 7]))
    await call.say(destination=peer.destination([0], state_slot=0))
    await call.next("committed")
    await call.expect(grpc.StatusCode.UNAVAILABLE)
    assert call.seen[-1].HasField("quiesced")


async def test_a_call_that_is_never_half_closed_holds_no_memory(
    service: Service, peer: Peer
) -> None:
    call = Call(service.stub)
    call.does_half_close = False
    await call.say(start=peer.start([5, 6, 7]))
    await call.say(destination=peer.destination([0], state_slot=0))
    await call.next("committed")
    await call.say(received=prefill_pb2.Received(generation=1))
    await call.next("ending")
    assert await service.is_at_baseline()
    call.cancel()


async def test_prompt_logprobs_arrive_for_every_token(
    service: Service, peer: Peer, cases: dict[str, Tensor]
) -> None:
    ids = cases["case0.input_ids"].tolist()
    wanted = common_pb2.LogprobParams(enabled=True, top=2)
    call = Call(service.stub)
    await call.say(start=peer.start(ids, prompt_logprobs=wanted, logprobs=wanted))
    prefilled = (await call.next("prefilled")).prefilled
    parts = [r.prompt_logprobs for r in call.seen if r.HasField("prompt_logprobs")]
    tokens = [token for part in parts for token in part.tokens]
    assert [part.start for part in parts] == [0, 25]
    assert [token.id for token in tokens] == ids
    assert not tokens[0].HasField("logprob")
    expected = cases["case0.logits"].double().log_softmax(-1)
    for position, token in enumerate(tokens[1:], 1):
        assert token.logprob == pytest.approx(
            expected[position - 1, ids[position]].item(), abs=2e-4
        )
        assert len(token.top) == 2
    assert prefilled.token.logprob == pytest.approx(expected[-1].max().item(), abs=2e-4)
    await call.say(abort=prefill_pb2.Abort(reason=prefill_pb2.ABORT_REASON_STOPPED))
    await call.expect()


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"token_ids": [100_000]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"grammar": b"x"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"token_ids": [1] * 301}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"layout_fingerprint": "00"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"instance_id": "decode-nobody"}, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_at_once(
    service: Service, peer: Peer, fields: dict[str, object], status: grpc.StatusCode
) -> None:
    call = Call(service.stub)
    await call.say(start=peer.start(**{"token_ids": [1, 2], **fields}))
    await call.expect(status)


async def test_a_full_queue_is_refused_at_once(service: Service, peer: Peer) -> None:
    """4 running + 3 waiting fit; the prompts are long enough to be still there when the last one comes."""
    calls = [Call(service.stub) for _ in range(12)]
    for call in calls:
        await call.say(start=peer.start([1] * 290))
    statuses = [asyncio.create_task(call.next("accepted")) for call in calls]
    done, _ = await asyncio.wait(statuses, timeout=10.0)
    refused = [task for task in done if task.exception() is not None]
    assert len(refused) >= 1
    for task in refused:
        error = task.exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc_error(error).code == "queue_full"
    for call in calls:
        call.cancel()


async def random_call(service: Service, peer: Peer, rng: random.Random) -> str:
    """One call that ends in a random way; returns which."""
    n = rng.choice([1, P - 1, P, P + 1, 33, 120, 250])
    ending = rng.choice(["received", "received", "aborted", "cancelled", "cancelled early"])
    call = Call(service.stub)
    try:
        await call.say(start=peer.start([rng.randrange(500) for _ in range(n)]))
        if ending == "cancelled early":
            call.cancel()
            return ending
        pages = rng.sample(range(40), -(-n // P))
        await call.say(destination=peer.destination(pages, rng.randrange(8)))
        await call.next(rng.choice(["accepted", "prefilled", "committed"]))
        if ending == "cancelled":
            call.cancel()
            return ending
        if ending == "aborted":
            await call.say(abort=prefill_pb2.Abort(generation=1))
            await call.next("quiesced")
        else:
            if not call.has_seen("committed"):
                await call.next("committed")
            await call.say(received=prefill_pb2.Received(generation=1))
        await call.expect()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.expect(grpc.StatusCode.RESOURCE_EXHAUSTED)
        return "refused"
    return ending


@pytest.mark.parametrize("seed", [7])
async def test_calls_that_end_in_any_way_leave_nothing_behind(
    service: Service, peer: Peer, seed: int
) -> None:
    rng = random.Random(seed)

    async def client() -> list[str]:
        return [await random_call(service, peer, rng) for _ in range(4)]

    endings = [e for part in await asyncio.gather(*(client() for _ in range(7))) for e in part]
    assert endings.count("refused") < len(endings)
    assert await service.is_at_baseline()
    assert service.engine.life().handoff.n_transfers == 0


async def test_the_loss_of_a_rank_fails_open_requests_and_the_group_comes_back(
    service: Service, peer: Peer
) -> None:
    """Last on purpose: afterwards the peer must connect again."""
    before = service.engine.describe().instance_id
    call = Call(service.stub)
    await call.say(start=peer.start([1] * 290))
    await call.next("accepted")
    os.kill(rank_pid(), signal.SIGKILL)
    await call.expect(grpc.StatusCode.UNAVAILABLE)
    async with asyncio.timeout(60.0):
        while service.engine.readiness():
            service.engine.load_changed.clear()
            await service.engine.load_changed.wait()
    assert service.engine.describe().instance_id != before
    lost = Call(service.stub)
    await lost.say(start=peer.start([1, 2, 3]))
    await lost.expect(grpc.StatusCode.FAILED_PRECONDITION)
    with pytest.raises(ReconnectRequired):
        service.engine.life().peers.find(peer.instance_id)
    await service.stub.Connect(peer.connect_request())
    again = Call(service.stub)
    await again.say(start=peer.start([1, 2, 3]))
    await again.say(destination=peer.destination([0], state_slot=0))
    await again.next("committed")
    await again.say(received=prefill_pb2.Received(generation=1))
    await again.expect()


def rank_pid() -> int:
    """Process id of the last rank of this test process."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    ranks = [
        int(pid) for pid in children if b"k3.rank\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return ranks[-1]
