"""The generations this router is serving: for operators to see and abort, for draining to wait on and to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from k3.errors import K3Error, NotFound, RequestAborted, Unavailable


class Stage(Enum):
    """How far a request is; values are metric labels."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class OpenRequest:
    """One generation in progress. `ended_by` is completed when somebody here ends it."""

    request_id: str
    model: str
    path: str
    n_prompt_tokens: int
    since: float
    ended_by: asyncio.Future[K3Error]
    stage: Stage = Stage.QUEUE
    n_tokens: int = 0
    pairs: list[str] = field(default_factory=list[str])

    def end(self, error: K3Error) -> None:
        """End it with an error the client sees; idempotent."""
        if not self.ended_by.done():
            self.ended_by.set_result(error)

    def to_json(self, now: float) -> dict[str, Any]:
        """What operators see."""
        return {
            "id": self.request_id,
            "model": self.model,
            "path": self.path,
            "stage": self.stage.value,
            "prompt_tokens": self.n_prompt_tokens,
            "completion_tokens": self.n_tokens,
            "pairs": self.pairs,
            "age_s": round(now - self.since, 3),
        }


class RequestTable:
    """Open requests by a number of their own: clients may use an id twice."""

    def __init__(self) -> None:
        self._open: dict[int, OpenRequest] = {}
        self._next = 0
        self._n_prepared = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def open(
        self, request_id: str, model: str, path: str, n_prompt_tokens: int
    ) -> Generator[OpenRequest]:
        """List a request while it runs."""
        number, self._next = self._next, self._next + 1
        ended_by: asyncio.Future[K3Error] = asyncio.get_running_loop().create_future()
        request = OpenRequest(request_id, model, path, n_prompt_tokens, time.monotonic(), ended_by)
        self._open[number] = request
        self._idle.clear()
        try:
            yield request
        finally:
            del self._open[number]
            self._notice_idle()

    @contextmanager
    def preparing(self) -> Generator[None]:
        """Something that was let in becomes a request of the list, or fails before: not idle until then."""
        self._n_prepared += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._n_prepared -= 1
            self._notice_idle()

    def list(self) -> list[dict[str, Any]]:
        """All open requests, oldest first."""
        now = time.monotonic()
        return [request.to_json(now) for request in self._open.values()]

    def abort(self, request_id: str) -> int:
        """End every open request with this id. NotFound when there is none."""
        found = [r for r in self._open.values() if r.request_id == request_id]
        if not found:
            raise NotFound(f"no open request {request_id!r}; GET /admin/requests lists them")
        for request in found:
            request.end(RequestAborted(f"request {request_id} was aborted by an operator"))
        return len(found)

    def fail_all(self) -> None:
        """End everything: the router stops."""
        for request in tuple(self._open.values()):
            request.end(Unavailable("the router is shutting down", code="draining"))

    async def idle(self) -> None:
        """Wait until nothing is open, and nothing is being prepared."""
        while (
            self._open or self._n_prepared
        ):  # what was prepared may have been opened since it was noticed
            await self._idle.wait()

    def _notice_idle(self) -> None:
        if not self._open and not self._n_prepared:
            self._idle.set()
