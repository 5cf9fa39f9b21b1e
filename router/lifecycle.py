"""Running, draining, refusing: what the router answers on its way out.

RUNNING -> DRAINING (not ready, still serves what arrives) -> REFUSING (new requests get 503) -> STOPPED
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from enum import Enum
from typing import Any

from k3.config.router_sections import HttpConfig
from k3.errors import Unavailable
from router.requests import RequestTable

log = logging.getLogger("k3.router.lifecycle")


class Phase(Enum):
    """Where the router is in its life."""

    RUNNING = "running"
    DRAINING = "draining"
    REFUSING = "refusing"
    STOPPED = "stopped"


class Lifecycle:
    """One per router. `drain` may be called once; `hurry` cuts it short."""

    def __init__(self, config: HttpConfig, requests: RequestTable) -> None:
        self._config = config
        self._requests = requests
        self._hurry = asyncio.Event()
        self.phase = Phase.RUNNING

    @property
    def is_draining(self) -> bool:
        """Whether the router is on its way out."""
        return self.phase is not Phase.RUNNING

    def check_open(self) -> None:
        """Raises Unavailable when new requests are refused."""
        if self.phase in (Phase.REFUSING, Phase.STOPPED):
            raise Unavailable("the router is draining; use another one", code="draining")

    def hurry(self) -> None:
        """End the remaining requests now."""
        self._hurry.set()

    async def drain(self) -> None:
        """Leave: keep serving for drain_delay_s, then finish what runs, at the limit fail it."""
        if self.phase is not Phase.RUNNING:
            return
        self._enter(Phase.DRAINING)
        await self._wait(self._hurry.wait(), self._config.drain_delay_s)
        self._enter(Phase.REFUSING)
        await self._wait(self._idle_or_hurry(), self._config.drain_timeout_s)
        self._requests.fail_all()
        await self._wait(self._requests.idle(), 5.0)
        self._enter(Phase.STOPPED)

    async def _idle_or_hurry(self) -> None:
        waits: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._requests.idle()),
            asyncio.create_task(self._hurry.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    @staticmethod
    async def _wait(awaitable: Awaitable[object], limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await awaitable
        except TimeoutError:
            pass

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        log.info(
            "router changed phase", extra={"phase": phase.value, "n_open": len(self._requests)}
        )
