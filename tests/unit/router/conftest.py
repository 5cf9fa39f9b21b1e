"""A router in this process over engines at the protocol: real HTTP, real gRPC, scripted tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from k3.config.router_sections import AdmissionConfig, FleetConfig, HttpConfig
from k3.config.tree import ModelConfig, RouterConfig
from router.__main__ import Router, bind
from router.text.folder import ModelFolder, load_model_folder
from tests.unit.router.fake_engine import FakeEngine

TINY = Path(__file__).parents[3] / "k3" / "assets" / "tiny"
DEADLINE_S = 10.0


async def until(condition: Callable[[], bool], what: str = "condition") -> None:
    """Wait for a condition with a deadline."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + DEADLINE_S
    while not condition():
        if loop.time() > limit:
            raise AssertionError(f"{what}: not reached within {DEADLINE_S} s")
        await asyncio.sleep(0.005)


@dataclass
class RunningRouter:
    """A router that listens, and what it talks to."""

    url: str
    admin_url: str
    client: httpx.AsyncClient
    decode: FakeEngine
    prefill: FakeEngine
    folder: ModelFolder
    router: Router

    def ids(self, text: str) -> list[int]:
        return self.folder.tokenizer.encode(text, allow_special=True)

    async def ready(self) -> None:
        loop = asyncio.get_running_loop()
        limit = loop.time() + DEADLINE_S
        while (await self.client.get("/ready")).status_code != 200:
            if loop.time() > limit:
                raise AssertionError((await self.client.get("/ready")).text)
            await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def folder() -> ModelFolder:
    return load_model_folder(TINY, "tiny")


@asynccontextmanager
async def running_router(
    folder: ModelFolder,
    *,
    http: HttpConfig | None = None,
    admission: AdmissionConfig | None = None,
    decodes: list[FakeEngine] | None = None,
    prefills: list[FakeEngine] | None = None,
    wait_ready: bool = True,
) -> AsyncIterator[RunningRouter]:
    decodes = [FakeEngine()] if decodes is None else decodes
    prefills = (
        [FakeEngine(role="prefill", instance_id="prefill-a")] if prefills is None else prefills
    )
    for engine in (*decodes, *prefills):
        await engine.start()
    http = replace(
        http or HttpConfig(), port=0, admin_port=0, drain_delay_s=0.0, drain_timeout_s=5.0
    )
    config = RouterConfig(
        model=ModelConfig(path=str(TINY), name="tiny"),
        http=http,
        fleet=FleetConfig(
            decodes=tuple(engine.address for engine in decodes),
            prefills=tuple(engine.address for engine in prefills),
        ),
        admission=admission or AdmissionConfig(),
    )
    public, admin = bind("127.0.0.1", 0, "http.port"), bind("127.0.0.1", 0, "http.port")
    router = Router(config, folder)
    task = asyncio.create_task(router.run(public, admin))
    url, admin_url = (f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in (public, admin))
    try:
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
            running = RunningRouter(
                url,
                admin_url,
                client,
                decodes[0] if decodes else FakeEngine(),
                prefills[0] if prefills else FakeEngine(),
                folder,
                router,
            )
            if wait_ready:
                await running.ready()
            yield running
    finally:
        router.drain.signal()
        router.drain.signal()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, DEADLINE_S)
        for engine in (*decodes, *prefills):
            await engine.stop()
        for sock in (public, admin):
            sock.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_router(folder: ModelFolder) -> AsyncIterator[RunningRouter]:
    """One router for all tests of a module that hurt no instance; they run on the module's event loop."""
    async with running_router(folder) as running:
        yield running


@pytest.fixture
async def router(folder: ModelFolder) -> AsyncIterator[RunningRouter]:
    async with running_router(folder) as running:
        yield running
