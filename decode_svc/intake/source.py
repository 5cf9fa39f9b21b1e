"""Where prompts are computed, seen from decode: `PrefillSource`, its calls, and pairs of instances.

`decode_svc/intake/remote.py` implements it over gRPC; tests script it. A call delivers what it hears into an inbox and
is never read by anybody else, so an attempt may stop waiting at any moment without ending the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from k3.errors import K3Error, LayoutMismatch, ReconnectRequired, Unavailable
from k3.v1 import prefill_pb2


class PrefillLost(Unavailable):
    """The instance was lost without a word of its own: connection refused, reset or silent."""

    code = "prefill_lost"


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill instance that has loaded our agents. Outdated as soon as either side restarts."""

    address: str
    instance_id: str
    geometry: prefill_pb2.Geometry
    sends_draft: bool = False  # it has our drafter


@dataclass(frozen=True, slots=True)
class Heard:
    """A message of the stream."""

    message: prefill_pb2.PrefillResponse


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream is over; error None means that prefill closed it with OK. Delivered once, last."""

    error: K3Error | None


Deliver = Callable[[Heard | Ended], None]


class PrefillCall(Protocol):
    """One open `Prefill` stream."""

    async def send(self, message: prefill_pb2.PrefillRequest) -> None:
        """Send one message. On a broken stream it returns silently: `Ended` tells."""
        ...

    def cancel(self) -> None:
        """End the call without ceremony. Idempotent."""
        ...


class Proof(Enum):
    """What is known of a transfer whose stream was lost."""

    QUIET = "quiet"  # no write can land any more
    DRAINING = "draining"  # posted writes have not ended
    DEAD = "dead"  # the process that posted them is gone


class PrefillSource(Protocol):
    """Prefill instances by address."""

    async def connect(self, address: str) -> Pair:
        """Introduce this instance. Raises K3Error; LayoutMismatch when the two do not fit."""
        ...

    def open(self, pair: Pair, deliver: Deliver) -> PrefillCall:
        """Open a stream; what it hears goes to `deliver` until `Ended`."""
        ...

    async def quiesce(self, pair: Pair, transfer_id: int) -> Proof:
        """Ask about a transfer whose stream was lost. Raises K3Error when nothing is known."""
        ...


class Pairs:
    """Pairs by address, connected on first use; callers that come meanwhile wait for the same Connect.

    observe: called with "ok", "refused" or "failed" after each Connect.
    """

    def __init__(self, source: PrefillSource, observe: Callable[[str], None]) -> None:
        self._source = source
        self._observe = observe
        self._tasks: dict[str, asyncio.Task[Pair]] = {}

    async def get(self, address: str) -> Pair:
        """The pair of `address`. Raises K3Error; the next call tries again then.

        Raises ReconnectRequired when our agents changed while the connection was made.
        """
        task = self._tasks.get(address)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._connect(address), name=f"connect {address}")
            self._tasks[address] = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if not task.cancelled() or me is None or me.cancelling():
                raise
            raise ReconnectRequired(
                f"the connection to {address} was given up: the transfer agents of this instance changed"
            ) from None

    async def _connect(self, address: str) -> Pair:
        try:
            pair = await self._source.connect(address)
        except K3Error as error:
            self._observe("refused" if isinstance(error, LayoutMismatch) else "failed")
            raise
        self._observe("ok")
        return pair

    def forget(self, pair: Pair) -> None:
        """The pair is outdated: connect again before its next use."""
        task = self._tasks.get(pair.address)
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return
        if task.result() == pair:
            del self._tasks[pair.address]

    def forget_all(self) -> None:
        """Our agents changed: every peer must learn the new ones."""
        self.close()

    def close(self) -> None:
        """Cancel what is being connected."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()


def is_allowed(address: str, patterns: Sequence[str]) -> bool:
    """Whether configuration lets us dial `address`. Patterns are host:port, each of them `*` for any."""
    host, _, port = address.rpartition(":")
    for pattern in patterns:
        allowed_host, _, allowed_port = pattern.rpartition(":")
        if _matches(host, allowed_host) and allowed_port in ("*", port):
            return bool(host) and port.isdigit()
    return False


def _matches(host: str, pattern: str) -> bool:
    """`*` any host, `*.suffix` any name below it, else equality."""
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    return pattern in ("*", host)
