"""`k3-router`: configuration, assembly, two HTTP servers, drain on a signal.

Exit codes: 0 after a drain, 2 configuration, 3 model folder, 4 port in use, 1 anything else.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import socket
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from k3.config.api_keys import read_keys
from k3.config.load import config_hash, router_config, to_json
from k3.config.tree import RouterConfig
from k3.errors import ConfigError, ModelError, PortInUse
from k3.rpc.client import ChannelPool, client_tls
from k3.rpc.server import bound_socket, check_port
from k3.telemetry import logs
from k3.telemetry.metrics import RouterMetrics
from router.admin import Admin
from router.admission import Admission
from router.app import admin_app, public_app
from router.auth import Keys
from router.connection import Connection
from router.fleet.attempt import Dispatcher
from router.fleet.instance import Role
from router.fleet.policies import make_rules
from router.fleet.registry import Registry
from router.lifecycle import Lifecycle
from router.openai.body import BodyReader
from router.openai.params import Settings
from router.openai.serving import Serving
from router.requests import RequestTable
from router.text.folder import ModelFolder, load_model_folder
from router.text.threads import TextThreads

log = logging.getLogger("k3.router")
EXIT_CONFIG, EXIT_MODEL, EXIT_PORT = 2, 3, 4
KEEP_ALIVE_S = 75
MAX_UNKNOWN_FIELDS = 64


def main() -> None:
    """Entry point of `k3-router`."""
    config = router_config(sys.argv[1:])
    logs.setup(config.telemetry.log_format, config.telemetry.log_level, "router")
    try:
        folder = load_model_folder(
            Path(config.model.path), config.model.name, config.model.max_model_len
        )
    except ModelError as error:
        log.error("model folder does not fit", extra={"error": str(error)})
        sys.exit(EXIT_MODEL)
    try:
        public = bind(config.http.host, config.http.port, "http.port")
        admin = bind(config.http.admin_host, config.http.admin_port, "http.admin_port")
    except (ConfigError, PortInUse) as error:
        log.error("cannot go on", extra={"code": error.code, "error": str(error)})
        sys.exit(EXIT_PORT if isinstance(error, PortInUse) else EXIT_CONFIG)
    asyncio.run(_serve(config, folder, public, admin))


async def _serve(
    config: RouterConfig, folder: ModelFolder, public: socket.socket, admin: socket.socket
) -> None:
    router = Router(config, folder)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, router.drain.signal)
    await router.run(public, admin)


def bind(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket. Raises PortInUse or ConfigError, which name the setting."""
    check_port(host, port, setting)
    sock = bound_socket(host, port)
    sock.listen(2048)
    sock.setblocking(False)
    return sock


class UnknownFields:
    """Counts unknown body fields by name, the first MAX_UNKNOWN_FIELDS of them; clients choose the names."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._names: set[str] = set()

    def __call__(self, name: str) -> None:
        """One more."""
        if name not in self._names and len(self._names) >= MAX_UNKNOWN_FIELDS:
            name = "other"
        self._names.add(name)
        self._metrics.unknown_params.labels(name[:64]).inc()


class Router:
    """Owns everything that lives as long as the process. Made inside the event loop."""

    def __init__(self, config: RouterConfig, folder: ModelFolder) -> None:
        self._config = config
        self._folder = folder
        self._metrics = RouterMetrics()
        if config.telemetry.metrics_compat == "vllm":
            self._metrics.show_aliases(folder.name)
        self.drain = Drain()
        self._keys = Keys(read_keys(config.http.api_key_file))
        self._admin_keys = Keys(read_keys(config.http.admin_key_file))
        fleet, admission = config.fleet, config.admission
        self._texts = TextThreads(admission.max_in_flight + admission.max_queue)
        tls = client_tls(fleet.tls_ca, fleet.tls_cert, fleet.tls_key)
        self._channels = ChannelPool(tls, fleet.connect_timeout_s)
        self.serving = self._serving()

    async def run(self, public: socket.socket, admin: socket.socket) -> None:
        """Serve until drained."""
        fleet, serving, channels = self._config.fleet, self.serving, self._channels
        for address in fleet.prefills:
            serving.registry.add(Role.PREFILL, address)
        for address in fleet.decodes:
            serving.registry.add(Role.DECODE, address)
        handlers = Admin(serving, channels, to_json(self._config), self.drain.begin)
        servers = (
            (_server(public_app(serving, self._keys)), public),
            (_server(admin_app(serving, handlers, self._admin_keys)), admin),
        )
        log.info(
            "router listens",
            extra={
                "address": _address(public),
                "admin": _address(admin),
                "model": self._folder.name,
            },
        )
        try:
            async with asyncio.TaskGroup() as group:
                for server, sock in servers:
                    group.create_task(server.serve(sockets=[sock]))
                await self._drained(serving.lifecycle)
                for server, _ in servers:
                    server.should_exit = True
        finally:
            await serving.registry.stop()
            await channels.close()
            self._texts.close()

    async def _drained(self, lifecycle: Lifecycle) -> None:
        """Wait until asked to leave, then leave."""
        await self.drain.asked.wait()
        async with asyncio.TaskGroup() as group:
            hurry = group.create_task(self._hurry(lifecycle))
            await lifecycle.drain()
            hurry.cancel()

    async def _hurry(self, lifecycle: Lifecycle) -> None:
        await self.drain.hurried.wait()
        lifecycle.hurry()

    def _serving(self) -> Serving:
        config, metrics, channels = self._config, self._metrics, self._channels
        rules = make_rules(
            config.fleet.policy,
            config.fleet.prefill_policy,
            config.fleet.max_retries,
            random.Random(time.time_ns()),
        )
        registry = Registry(channels, rules, self._folder.vocab_size)
        admission = Admission(config.admission, registry)
        registry.listen(admission.pump)
        requests = RequestTable()
        own_version, own_hash = version("k3-serving"), config_hash(config)
        metrics.common.identify(own_version, own_hash, "")
        return Serving(
            settings=Settings(config.http, self._folder),
            registry=registry,
            admission=admission,
            dispatcher=Dispatcher(registry, admission, channels, metrics, config.fleet.policy),
            requests=requests,
            lifecycle=Lifecycle(config.http, requests),
            metrics=metrics,
            reader=BodyReader(
                config.http.max_body_bytes,
                UnknownFields(metrics),
                refuse_unknown=config.http.strict_params,
            ),
            texts=self._texts,
            created=int(time.time()),
            version=own_version,
            config_hash=own_hash,
        )


class Drain:
    """Asked the router drains; at the second signal it ends what is left at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self._n_signals = 0

    def begin(self) -> None:
        """Drain; once more changes nothing."""
        self.asked.set()

    def signal(self) -> None:
        """What a signal does. The first one is no hurry, even where a drain was asked for before it."""
        self._n_signals += 1
        (self.asked if self._n_signals == 1 else self.hurried).set()


class _Server(uvicorn.Server):
    """Signals are the router's own matter."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the handlers alone."""
        yield


def _server(app: ASGIApp) -> uvicorn.Server:
    return _Server(
        uvicorn.Config(
            app,
            http=Connection,
            access_log=False,
            log_config=None,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            server_header=False,
            ws="none",
        )
    )


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"{host}:{port}"


if __name__ == "__main__":
    main()
