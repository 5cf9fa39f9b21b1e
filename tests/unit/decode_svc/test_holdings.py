"""Who holds what, as the ops port and the gauges show it."""

from dataclasses import replace

import pytest

from decode_svc.deployment import Deployment
from decode_svc.holdings import holdings, overview
from decode_svc.ledger import Ledger
from decode_svc.memory import PoolMemory
from decode_svc.request import DecodeRequest, RequestSpec
from decode_svc.scheduler import DecodeScheduler, Limits
from k3.cache.layout import build_layout
from k3.cache.pages import PagePool
from k3.cache.slots import SlotPool
from k3.config.tree import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, ScheduleConfig
from k3.parallel.mesh import Mesh
from k3.types import RequestId, SamplingParams, StopParams, TokenEvent
from tests.sim.decode_world import NANO

pytestmark = pytest.mark.helix

P = 16
CONFIG = EngineConfig(
    role="decode",
    model=ModelConfig(str(NANO), "nano", "float64", "cpu", 64),
    cache=CacheConfig(page_tokens=4, pages=12, state_slots=4),
    schedule=ScheduleConfig(max_rows=3),
)


def running(cp: int, n: int) -> tuple[DecodeScheduler, DecodeRequest]:
    scheduler = DecodeScheduler(
        Ledger(P, cp),
        Limits(max_queue=2, max_model_len=8192),
        memory=PoolMemory(PagePool(600), SlotPool(2, first=1)),
        rows=SlotPool(2, first=1),
    )
    spec = RequestSpec(RequestId("r-1"), (1,) * n, SamplingParams(), StopParams(40))
    request = scheduler.submit(spec, 0.0)
    scheduler.admit(0.0)
    scheduler.fill(request)
    scheduler.first_token(request, TokenEvent(3))
    scheduler.filled(request)
    return scheduler, request


def test_every_rank_holds_its_share_within_a_page() -> None:
    scheduler, _request = running(4, 5000)
    tokens = scheduler.rank_tokens()
    assert sum(tokens) == 5000
    assert all(abs(n - 5000 / 4) <= P for n in tokens)


def test_the_page_of_a_request_names_pages_positions_and_tokens_of_every_rank() -> None:
    scheduler, request = running(2, 37)
    shown = holdings(scheduler.ledger, request, token_bytes=10)
    assert (shown["request_id"], shown["state"], shown["tokens"]) == ("r-1", "running", 37)
    pages = request.held.pages
    assert shown["ranks"] == [
        {
            "cp": 0,
            "tokens": 21,
            "latent_bytes": 210,
            "pages": [
                {"page": pages[0], "first": 0, "tokens": 16},
                {"page": pages[1], "first": 32, "tokens": 5},
                {"page": pages[2], "first": 64, "tokens": 0},
            ],
        },
        {
            "cp": 1,
            "tokens": 16,
            "latent_bytes": 160,
            "pages": [
                {"page": pages[0], "first": 16, "tokens": 16},
                {"page": pages[1], "first": 48, "tokens": 0},
                {"page": pages[2], "first": 80, "tokens": 0},
            ],
        },
    ]


def test_the_overview_lists_open_requests_and_sums_their_tokens() -> None:
    scheduler, request = running(2, 37)
    waiting = scheduler.submit(replace(request.spec, request_id=RequestId("r-2")), 0.0)
    shown = overview(scheduler.ledger, scheduler.open_requests())
    assert shown["rank_tokens"] == scheduler.rank_tokens() == [21, 16]
    assert shown["requests"] == [
        {"request_id": "r-1", "state": "running", "tokens": 37},
        {"request_id": "r-2", "state": "queued", "tokens": 0},
    ]
    assert holdings(scheduler.ledger, waiting, token_bytes=10)["ranks"] == [
        {"cp": 0, "tokens": 0, "latent_bytes": 0, "pages": []},
        {"cp": 1, "tokens": 0, "latent_bytes": 0, "pages": []},
    ]


def test_a_tokens_bytes_are_those_of_its_share_of_a_page() -> None:
    deployment = Deployment.of(replace(CONFIG, parallel=ParallelConfig(cp=4)), "digest")
    layout = build_layout(deployment.spec, Mesh(cp=4), 0, page_tokens=P, dtype=CONFIG.model.dtype)
    assert P * deployment.latent_token_bytes == layout.page_bytes


def test_values_cost_fewer_bytes_than_latents_and_one_rank_costs_none() -> None:
    def exchanged(tp: int = 1, cp: int = 1, exchange: str = "value") -> int:
        config = replace(CONFIG, parallel=ParallelConfig(tp=tp, cp=cp, exchange=exchange))
        return Deployment.of(config, "digest").exchange_bytes

    spec = Deployment.of(CONFIG, "digest").spec
    layers = sum(map(spec.is_mla, range(spec.num_layers)))
    assert exchanged() == exchanged(tp=2) == 0
    # float64: the heads of the other rank, an output and a log-sum-exp each
    assert exchanged(cp=2) == layers * 2 * (spec.mla.v_dim + 1) * 8
    assert exchanged(cp=2, exchange="latent") == layers * 2 * (spec.mla.kv_lora_rank + 1) * 8
    assert exchanged(tp=2, cp=2) == layers * 1 * (spec.mla.v_dim + 1) * 8
    assert exchanged(cp=4) == layers * 3 * (spec.mla.v_dim + 1) * 8
    # gather: all four heads of the slice to every other rank of the stage
    assert exchanged(tp=2, exchange="gather") == 0
    assert exchanged(cp=2, exchange="gather") == layers * 4 * 1 * (spec.mla.v_dim + 1) * 8
    assert exchanged(tp=2, cp=2, exchange="gather") == layers * 2 * 3 * (spec.mla.v_dim + 1) * 8
