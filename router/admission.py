"""The router's queue: who may start now, who waits, who is refused at once.

Order is arrival. A request that does not fit does not block smaller ones behind it, but at most MAX_SKIPS of them may
pass it; then everybody waits for it. `pump` is called whenever something may have become free.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import NamedTuple, Protocol

from k3.config.router_sections import AdmissionConfig
from k3.errors import DeadlineExceeded, QueueFull, RequestRejected, Unavailable
from router.fleet.instance import Lease
from router.fleet.pairing import Need, NoPair, Pair

MAX_SKIPS = 16
RETRY_AFTER_S = 1.0


class Placement(NamedTuple):
    """A chosen pair and the lease on it, to be released by whoever got it."""

    pair: Pair
    lease: Lease
    queue_s: float


class Fleet(Protocol):
    """What the queue asks of the registry."""

    def choose(self, need: Need, excluded: frozenset[str] = frozenset()) -> Pair | NoPair:
        """A pair, or why not."""
        ...

    def lease(self, pair: Pair, need: Need) -> Lease:
        """Count one sample at a pair."""
        ...


class _Waiter:
    def __init__(self, need: Need, excluded: frozenset[str], since: float) -> None:
        self.need = need
        self.excluded = excluded
        self.since = since
        self.n_skips = 0
        self.placed: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()


class Admission:
    """Bounds requests in flight and in the queue. One per router, on the event loop."""

    def __init__(self, config: AdmissionConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._queue: deque[_Waiter] = deque()
        self.n_in_flight = 0

    @property
    def queue_depth(self) -> int:
        """Requests waiting."""
        return len(self._queue)

    async def place(self, need: Need, excluded: frozenset[str] = frozenset()) -> Placement:
        """A pair with room, now or after waiting; call `release` with it at the end.

        Raises QueueFull, DeadlineExceeded (queue_timeout), Unavailable or RequestRejected (can never fit).
        """
        waiter = _Waiter(need, excluded, time.monotonic())
        self._queue.append(waiter)
        try:
            self.pump()
            if waiter.placed.done():
                return waiter.placed.result()
            if len(self._queue) > self._config.max_queue:
                raise QueueFull(
                    f"{self._config.max_queue} requests are waiting already; try again later",
                    retry_after_s=RETRY_AFTER_S,
                )
            async with asyncio.timeout(self._config.queue_timeout_s):
                return await asyncio.shield(waiter.placed)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no instance had room within {self._config.queue_timeout_s:g} s; "
                "try again later, with fewer max_tokens, or add decode instances",
                code="queue_timeout",
            ) from error
        except asyncio.CancelledError:
            if waiter.placed.done() and not waiter.placed.exception():
                self.release(waiter.placed.result())
            raise
        finally:
            if waiter in self._queue:
                self._queue.remove(waiter)
                self.pump()

    def release(self, placement: Placement) -> None:
        """The sample has ended."""
        placement.lease.release()
        self.n_in_flight -= 1
        self.pump()

    def join(self, pair: Pair, need: Need) -> Placement:
        """A further sample of a request at the pair that its first sample was given."""
        self.n_in_flight += 1
        return Placement(pair, self._fleet.lease(pair, need), 0.0)

    def pump(self) -> None:
        """Start whoever can start. Never raises; refusals go to their waiter."""
        passed: list[_Waiter] = []
        for waiter in tuple(self._queue):
            if self.n_in_flight >= self._config.max_in_flight:
                return
            if any(other.n_skips >= MAX_SKIPS for other in passed):
                return
            if waiter.placed.done():
                continue
            choice = self._fleet.choose(waiter.need, waiter.excluded)
            if choice is NoPair.FULL:
                passed.append(waiter)
                continue
            self._queue.remove(waiter)
            if isinstance(choice, NoPair):
                waiter.placed.set_exception(no_pair_error(choice, waiter.need))
                continue
            for other in passed:
                other.n_skips += 1
            self.n_in_flight += 1
            lease = self._fleet.lease(choice, waiter.need)
            waited_s = time.monotonic() - waiter.since
            waiter.placed.set_result(Placement(choice, lease, waited_s))


def no_pair_error(reason: NoPair, need: Need) -> Exception:
    """What a caller is told when there is no pair."""
    match reason:
        case NoPair.NEVER_FITS:
            return RequestRejected(
                f"{need.prompt_len} prompt tokens and up to {need.max_tokens} output tokens exceed what any instance "
                "can hold; shorten the prompt or lower max_tokens",
                code=reason.value,
                param="max_tokens",
            )
        case NoPair.FULL:
            return QueueFull("no instance has room", code=reason.value, retry_after_s=RETRY_AFTER_S)
        case NoPair.NO_DECODE | NoPair.NO_PREFILL:
            role = "decode" if reason is NoPair.NO_DECODE else "prefill"
            return Unavailable(
                f"no {role} instance is ready; see GET /ready for the reasons", code=reason.value
            )
