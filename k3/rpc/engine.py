"""The frame of an engine process: `serve` owns everything around the engine, from the ports to the exit code.

    ports bound -> health, probes up -> engine.start -> serving -> signal -> drain delay -> drain -> stopped

First SIGTERM or SIGINT: not ready any more, but requests are still served for `drain_delay_s` (routers notice); then
new ones are refused and running ones may finish within `drain_timeout_s`; the rest is failed with `draining`. A second
signal fails the rest at once. Exit codes: 0 asked to stop, 2 configuration, 3 model, 4 port in use, 1 anything else.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, cast

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from k3.config.load import config_hash
from k3.config.tree import EngineConfig
from k3.errors import ConfigError, K3Error, ModelError, PortInUse
from k3.rpc import server as rpc_server
from k3.rpc.health import HealthServicer
from k3.rpc.instance import Engine, InstanceServicer, Lifecycle, LoadBoard
from k3.rpc.ops import OpsServer, Page
from k3.telemetry import logs
from k3.telemetry.metrics import EngineMetrics
from k3.v1 import instance_pb2, instance_pb2_grpc

log = logging.getLogger("k3.engine")

STOP_GRACE_S = 1.0  # for answers that are already on their way
END_S = 10.0  # for the driver to return after stop
INSTANCE_SERVICE = instance_pb2.DESCRIPTOR.services_by_name["InstanceService"].full_name

__all__ = ["Engine", "run", "serve"]


async def serve(
    engine: Engine,
    config: EngineConfig,
    add_services: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
    metrics: EngineMetrics,
    pages: Mapping[str, Page] | None = None,
) -> int:
    """Run an engine until a signal or its failure; returns the exit code of the process.

    add_services: adds the engine's own servicers. service_names: their full names (`k3.v1.PrefillService`), for health
    and reflection. metrics: the registry that /metrics shows; its load gauges are kept up to date here. pages: what
    the ops port serves beyond the probes, by path.
    """
    telemetry = config.telemetry
    origin = logs.setup(telemetry.log_format, telemetry.log_level, config.role)
    try:
        frame = _Frame(engine, config, service_names, metrics, origin, pages or {})
        return await frame.run(add_services)
    except K3Error as error:
        log.error("cannot go on", extra={"code": error.code, "error": str(error)})
        return exit_code(error)


def run(config: EngineConfig, work: Coroutine[Any, Any, int]) -> int:
    """What a `main` does with its coroutine: run it, and turn our own errors into exit codes."""
    try:
        return asyncio.run(work)
    except K3Error as error:
        logs.setup(config.telemetry.log_format, config.telemetry.log_level, config.role)
        log.error("cannot start", extra={"code": error.code, "error": str(error)})
        return exit_code(error)


def exit_code(error: K3Error) -> int:
    """Exit code of a process that ends with `error`."""
    match error:
        case ConfigError():
            return 2
        case ModelError():
            return 3
        case PortInUse():
            return 4
        case _:
            return 1


class _Signals:
    """Counts SIGTERM and SIGINT from construction on."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived)

    def _arrived(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


class _Frame:
    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        service_names: Sequence[str],
        metrics: EngineMetrics,
        origin: logs.Origin,
        pages: Mapping[str, Page],
    ) -> None:
        self._engine, self._config, self._names = engine, config, tuple(service_names)
        self._origin = origin
        self._pages = pages
        self._signals = _Signals()
        self._lifecycle = Lifecycle(engine, config, metrics)
        self._health = HealthServicer()
        self._board = LoadBoard(engine.load_changed, self._lifecycle.watch, self._follow)
        self._instance = InstanceServicer(
            engine, self._lifecycle, self._board, config.serve.drain_timeout_s
        )
        self._helpers: tuple[asyncio.Task[None], ...] = ()
        self._stage = ""
        if config.telemetry.metrics_compat == "vllm":
            metrics.show_aliases(config.model.name)

    async def run(self, add_services: Callable[[grpc.aio.Server], None]) -> int:
        """Bind, start, serve, drain, stop."""
        serve_config = self._config.serve
        server = rpc_server.make_server(self._max_requests())
        port = rpc_server.bind(server, serve_config)
        rpc_server.check_port(serve_config.ops_host, serve_config.ops_port, "serve.ops_port")
        ops_socket = rpc_server.bound_socket(serve_config.ops_host, serve_config.ops_port)
        ops_port = ops_socket.getsockname()[1]
        ops = OpsServer(self._lifecycle, ops_socket, self._pages)
        self._add(server, add_services)
        await server.start()
        self._helpers = (
            asyncio.create_task(ops.run_until_stopped(), name="ops"),
            asyncio.create_task(self._board.run(), name="load board"),
        )
        log.info(
            "starting",
            extra={"port": port, "ops_port": ops_port, "config": config_hash(self._config)},
        )
        try:
            if await self._start():
                await self._serve(port)
            log.info("stopped")
            return 0
        finally:
            self._lifecycle.stopping()
            self._instance.close()
            self._board.close()
            await server.stop(STOP_GRACE_S)
            await self._engine.stop()
            ops.stop()
            await _end(*self._helpers)

    async def _start(self) -> bool:
        """Whether the engine is up; False when a signal came first."""
        if not await self._unless_signalled(self._engine.start(self._report)):
            return False
        self._lifecycle.started()
        return True

    async def _serve(self, port: int) -> None:
        """Until a signal and the drain after it. Raises what the driver raises."""
        self._origin.instance = self._engine.describe().instance_id  # the first line below has it
        log.info("serving", extra={"address": f"{self._config.serve.host}:{port}"})
        driver = asyncio.create_task(self._engine.run(), name="driver")
        try:
            if await self._unless(driver, self._signals.first):
                raise K3Error("the driver ended without being asked to; see the lines above")
            await self._drain(driver)
        finally:
            await self._engine.stop()
            await _end(driver)

    async def _drain(self, driver: asyncio.Task[None]) -> None:
        limits = self._config.serve
        self._lifecycle.stopping()
        log.info("draining", extra={"open": self._engine.n_open, "delay_s": limits.drain_delay_s})
        hurry = self._signals.second
        await _wait(driver, hurry, limits.drain_delay_s)
        self._engine.begin_drain()
        self._engine.load_changed.set()
        deadline = asyncio.get_running_loop().time() + limits.drain_timeout_s
        while self._engine.n_open and not hurry.is_set() and not driver.done():
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            await _wait(driver, hurry, min(left_s, 0.05))
        if self._engine.n_open:
            log.warning("failing open requests", extra={"open": self._engine.n_open})
            await self._engine.fail_open("draining")
        if driver.done():
            driver.result()

    async def _unless_signalled(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work`; False when the first signal came before its end (it is cancelled then)."""
        task = asyncio.create_task(work)
        try:
            return await self._unless(task, self._signals.first)
        finally:
            task.cancel()
            await _end(task)

    async def _unless(self, task: asyncio.Task[None], event: asyncio.Event) -> bool:
        """Wait for the task or the event; True when the task ended. Raises what the task, or a helper, raised."""
        waiter = asyncio.create_task(event.wait())
        await asyncio.wait({task, waiter, *self._helpers}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        for helper in self._helpers:
            if helper.done():
                helper.result()
                raise K3Error(f"the task {helper.get_name()!r} ended without being asked to")
        if not task.done():
            return False
        task.result()
        return True

    def _report(self, stage: str, done: int, total: int) -> None:
        self._lifecycle.report(stage, done, total)
        if stage != self._stage:
            self._stage = stage
            log.info("start-up stage", extra={"stage": stage})

    def _max_requests(self) -> int:
        # Twice what fits: a full queue must answer "full" instead of leaving calls waiting in the transport.
        return 2 * (self._config.schedule.max_rows + self._config.schedule.max_queue)

    def _add(
        self, server: grpc.aio.Server, add_services: Callable[[grpc.aio.Server], None]
    ) -> None:
        add_services(server)
        cast("Any", instance_pb2_grpc).add_InstanceServiceServicer_to_server(self._instance, server)
        cast("Any", health_pb2_grpc).add_HealthServicer_to_server(self._health, server)
        if self._config.serve.reflection:
            names = (*self._names, INSTANCE_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)

    def _follow(self, snapshot: instance_pb2.WatchResponse) -> None:
        """Let health and log lines follow what the instance says of itself."""
        self._origin.instance = snapshot.instance_id
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        self._health.set("", serving if self._lifecycle.is_alive() else not_serving)
        for name in self._names:
            self._health.set(name, not_serving if self._lifecycle.reasons() else serving)


async def _wait(driver: asyncio.Task[None], hurry: asyncio.Event, seconds: float) -> None:
    """Wait so long, or until the driver ends or somebody hurries."""
    waiter = asyncio.create_task(hurry.wait())
    await asyncio.wait({driver, waiter}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()


async def _end(*tasks: asyncio.Task[None]) -> None:
    """Let tasks that were told to end do so, cancel those that do not, and log what they raise."""
    pending = [task for task in tasks if not task.done()]
    if not pending:
        return
    _done, late = await asyncio.wait(pending, timeout=END_S)
    for task in late:
        task.cancel()
    for task, result in zip(
        pending, await asyncio.gather(*pending, return_exceptions=True), strict=True
    ):
        if isinstance(result, Exception):
            log.error(
                "task failed at its end", extra={"task": task.get_name(), "error": repr(result)}
            )
