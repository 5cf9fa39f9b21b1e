"""The frame of an engine process around a scripted engine: real ports, real signals, real clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k3 import errors
from k3.config.tree import EngineConfig, ServeConfig
from k3.rpc import client, engine, status
from k3.telemetry.metrics import PrefillMetrics
from k3.v1 import instance_pb2, instance_pb2_grpc
from tests.mute_client import mute_client

SERVICE = "k3.v1.PrefillService"


class ScriptedEngine:
    """Does what the test says."""

    def __init__(self) -> None:
        self.load_changed = asyncio.Event()
        self.identity = "prefill-a-1"
        self.n_open = 0
        self.is_draining = False
        self.reasons: list[tuple[str, str]] = []
        self.failed: list[str] = []
        self.n_stops = 0
        self.stalled = False
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.start_error: Exception | None = None
        self.crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stopped = asyncio.Event()

    async def start(self, report):
        report("load", 3, 10)
        await self.may_start.wait()
        if self.start_error is not None:
            raise self.start_error

    async def run(self):
        waiter = asyncio.create_task(self.stopped.wait())
        await asyncio.wait({waiter, self.crash}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if self.crash.done():
            self.crash.result()

    async def stop(self):
        self.n_stops += 1
        self.stopped.set()

    def describe(self):
        return instance_pb2.DescribeResponse(instance_id=self.identity, layout_fingerprint="ff")

    def load(self):
        return instance_pb2.Load(running=self.n_open, pages_total=17, pages_free=17 - self.n_open)

    def readiness(self):
        return self.reasons

    def is_stalled(self):
        return self.stalled

    def begin_drain(self):
        self.is_draining = True

    def end_drain(self):
        self.is_draining = False

    async def fail_open(self, code):
        self.failed.append(code)
        self.n_open = 0

    def cache_feed(self):
        return None

    def flush_cache(self):
        return 5, 2


class Running:
    """A served engine and clients of it."""

    def __init__(
        self, scripted: ScriptedEngine, task: asyncio.Task[int], config: EngineConfig
    ) -> None:
        self.engine, self.task = scripted, task
        self.pool = client.ChannelPool()
        self.address = f"127.0.0.1:{config.serve.port}"
        self.ops = f"http://127.0.0.1:{config.serve.ops_port}"
        self.instance = instance_pb2_grpc.InstanceServiceStub(self.pool.channel(self.address))
        self.health = health_pb2_grpc.HealthStub(self.pool.channel(self.address))

    async def get(self, path: str, method: str = "GET", **headers: str) -> httpx.Response:
        async with httpx.AsyncClient() as http:
            return await http.request(method, self.ops + path, headers=headers)

    async def healthy(self, service: str) -> bool:
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def until(self, condition, what: str) -> None:
        async with asyncio.timeout(20):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_ready(self) -> None:
        async def ready() -> bool:
            is_ready = (await self.get("/ready")).status_code == 200
            return is_ready and await self.healthy(SERVICE)  # told a moment later

        await self.until(ready, "ready")

    async def ended(self) -> int:
        async with asyncio.timeout(30):
            return await self.task


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def configuration(**serve: object) -> EngineConfig:
    quick = ServeConfig(port=free_port(), ops_port=free_port(), drain_delay_s=0.0)
    return replace(EngineConfig(role="prefill"), serve=replace(quick, **serve))


@asynccontextmanager
async def running(
    config: EngineConfig | None = None, prepare=lambda e: None
) -> AsyncIterator[Running]:
    config = config or configuration()
    scripted = ScriptedEngine()
    prepare(scripted)
    work = engine.serve(scripted, config, lambda server: None, [SERVICE], PrefillMetrics())
    served = Running(scripted, asyncio.create_task(work), config)
    await served.pool.ready(served.address, 20)
    try:
        yield served
    finally:
        if not served.task.done():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait([served.task], timeout=20)
        await served.pool.close()


async def test_a_started_engine_is_ready_alive_and_described():
    async with running() as served:
        await served.until_ready()
        assert (await served.get("/health")).json() == {"status": "ok"}
        assert (await served.get("/startup")).status_code == 200
        assert (await served.get("/readyz")).json() == {"ready": True, "reasons": []}
        version = (await served.get("/version")).json()
        described = await served.instance.Describe(instance_pb2.DescribeRequest())
        flushed = await served.instance.FlushCache(instance_pb2.FlushCacheRequest())
        assert await served.healthy(SERVICE)
        assert await served.healthy("")
    assert described.instance_id == version["instance_id"] == "prefill-a-1"
    assert (flushed.pages, flushed.checkpoints) == (5, 2)
    assert served.task.result() == 0
    assert served.engine.n_stops >= 1


async def test_while_starting_it_is_alive_but_neither_started_nor_ready():
    async with running(prepare=lambda e: e.may_start.clear()) as served:
        assert (await served.get("/health")).status_code == 200
        startup, ready = await served.get("/startup"), await served.get("/ready")
        assert (startup.status_code, startup.json()["stage"]) == (503, "load 3/10")
        assert ready.json()["reasons"] == [{"code": "starting", "detail": "load 3/10"}]
        assert not await served.healthy(SERVICE)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.instance.Describe(instance_pb2.DescribeRequest())
        error = status.from_rpc_error(caught.value)
        assert (type(error), error.code) == (errors.Unavailable, "starting")
        snapshot = await served.instance.Watch(instance_pb2.WatchRequest()).read()
        assert (snapshot.instance_id, snapshot.load.ready) == ("", False)
        served.engine.may_start.set()
        await served.until_ready()


async def test_a_signal_during_the_start_ends_it_with_0():
    async with running(prepare=lambda e: e.may_start.clear()) as served:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await served.ended() == 0
    assert served.engine.n_stops >= 1


async def test_metrics_follow_the_engines_own_counters():
    async with running() as served:
        await served.until_ready()
        served.engine.n_open = 3
        plain = await served.get("/metrics")
        openmetrics = await served.get("/metrics", accept="application/openmetrics-text")
        head = await served.get("/metrics", "HEAD")
    assert 'k3_kv_pages{state="free"} 14.0' in plain.text
    assert "k3_prefill_running 3.0" in plain.text
    assert "k3_ready 1.0" in plain.text
    assert openmetrics.text.endswith("# EOF\n")
    assert (head.status_code, head.text) == (200, "")


async def test_unknown_paths_and_methods_are_errors_in_the_usual_shape():
    async with running() as served:
        missing, wrong = await served.get("/nothing"), await served.get("/health", "POST")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")
    assert wrong.json()["error"]["type"] == "invalid_request_error"


async def test_watchers_see_every_change_and_the_newest_state():
    async with running() as served:
        await served.until_ready()
        watches = [served.instance.Watch(instance_pb2.WatchRequest()) for _ in range(2)]
        for watch in watches:
            assert (await watch.read()).load.running == 0
        served.engine.n_open = 7
        served.engine.reasons = [("pool_full", "0 pages")]
        served.engine.load_changed.set()
        for watch in watches:
            load = (await watch.read()).load
            assert (load.running, load.ready) == (7, False)
        assert not await served.healthy(SERVICE)
        assert await served.healthy("")


async def test_a_rebuilt_rank_group_shows_its_new_identity_everywhere(capsys):
    async with running() as served:
        await served.until_ready()
        watch = served.instance.Watch(instance_pb2.WatchRequest())
        assert (await watch.read()).instance_id == "prefill-a-1"
        served.engine.identity = "prefill-a-2"
        served.engine.load_changed.set()
        assert (await watch.read()).instance_id == "prefill-a-2"
        assert (await served.get("/version")).json()["instance_id"] == "prefill-a-2"
    last = [json.loads(line) for line in capsys.readouterr().out.splitlines()][-1]
    assert (last["msg"], last["instance"]) == ("stopped", "prefill-a-2")


async def test_health_watch_tells_when_readiness_goes():
    async with running() as served:
        await served.until_ready()
        watch = served.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        served.engine.reasons = [("pool_full", "0 pages")]
        served.engine.load_changed.set()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_watchers_that_read_nothing_hold_up_no_other():
    async with running() as served, mute_client(served.address) as client:
        await served.until_ready()
        for path in ("/grpc.health.v1.Health/Watch", "/k3.v1.InstanceService/Watch"):
            client.call(path, health_pb2.HealthCheckRequest())
        watch = served.instance.Watch(instance_pb2.WatchRequest())
        health = served.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        served.engine.reasons = [("transfer_slow", "rank 0")]
        served.engine.load_changed.set()
        async with asyncio.timeout(20):
            while (await watch.read()).load.ready:
                pass
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_stalled_engine_is_not_alive():
    async with running() as served:
        await served.until_ready()
        served.engine.stalled = True
        served.engine.load_changed.set()
        assert (await served.get("/health")).status_code == 503

        async def dead() -> bool:
            return not await served.healthy("")

        await served.until(dead, "liveness lost")


async def test_the_first_signal_lets_running_requests_finish():
    async with running(configuration(drain_timeout_s=30.0)) as served:
        await served.until_ready()
        served.engine.n_open = 1
        os.kill(os.getpid(), signal.SIGTERM)

        async def draining() -> bool:
            return served.engine.is_draining

        await served.until(draining, "draining")
        assert (await served.get("/ready")).json()["reasons"][0]["code"] == "draining"
        assert (await served.get("/health")).status_code == 200
        assert not served.task.done()
        served.engine.n_open = 0
        assert await served.ended() == 0
    assert served.engine.failed == []


async def test_during_the_drain_delay_requests_are_still_taken():
    async with running(configuration(drain_delay_s=30.0)) as served:
        await served.until_ready()
        os.kill(os.getpid(), signal.SIGTERM)

        async def unready() -> bool:
            return (await served.get("/ready")).status_code == 503

        await served.until(unready, "not ready")
        assert not served.engine.is_draining
        os.kill(os.getpid(), signal.SIGTERM)
        assert await served.ended() == 0


async def test_the_second_signal_fails_the_rest_at_once():
    async with running(configuration(drain_timeout_s=60.0)) as served:
        await served.until_ready()
        served.engine.n_open = 2
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert await served.ended() == 0
    assert served.engine.failed == ["draining"]


async def test_the_drain_limit_fails_the_rest():
    async with running(configuration(drain_timeout_s=0.1)) as served:
        await served.until_ready()
        served.engine.n_open = 2
        os.kill(os.getpid(), signal.SIGTERM)
        assert await served.ended() == 0
    assert served.engine.failed == ["draining"]


async def test_drain_over_grpc_can_be_resumed_and_has_a_limit():
    async with running() as served:
        await served.until_ready()
        served.engine.n_open = 1
        answer = await served.instance.Drain(instance_pb2.DrainRequest(drain=True))
        assert (answer.draining, answer.running) == (True, 1)
        assert (await served.get("/ready")).status_code == 503
        answer = await served.instance.Drain(instance_pb2.DrainRequest(drain=False))
        assert not answer.draining
        assert (await served.get("/ready")).status_code == 200
        await served.instance.Drain(instance_pb2.DrainRequest(drain=True, timeout_s=0.05))

        async def failed() -> bool:
            return served.engine.failed == ["draining"]

        await served.until(failed, "open requests failed")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 2),
        (errors.ModelError("tensor a.b is missing"), 3),
        (errors.GroupFailed("rank 0 died"), 1),
    ],
    ids=lambda v: type(v).__name__,
)
async def test_a_failed_start_ends_with_its_own_code(error, code):
    def prepare(scripted: ScriptedEngine) -> None:
        scripted.start_error = error

    scripted = ScriptedEngine()
    prepare(scripted)
    work = engine.serve(scripted, configuration(), lambda server: None, [SERVICE], PrefillMetrics())
    async with asyncio.timeout(30):
        assert await work == code
    assert scripted.n_stops >= 1


async def test_losing_the_driver_ends_the_process_with_1():
    async with running() as served:
        await served.until_ready()
        served.engine.crash.set_exception(errors.GroupFailed("rank 0 died"))
        assert await served.ended() == 1
    assert served.engine.n_stops >= 1


@pytest.mark.parametrize("which", ["port", "ops_port"])
async def test_a_taken_port_ends_the_process_with_4(which, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = configuration(**{which: taken.getsockname()[1]})
        work = engine.serve(
            ScriptedEngine(), config, lambda server: None, [SERVICE], PrefillMetrics()
        )
        assert await work == 4
    assert "is free" in capsys.readouterr().out
