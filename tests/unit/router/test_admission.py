"""The router's queue against a fleet that says what the test wants."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from k3.config.router_sections import AdmissionConfig
from k3.errors import DeadlineExceeded, QueueFull, RequestRejected, Unavailable
from router.admission import MAX_SKIPS, Admission, Placement
from router.fleet.pairing import InstanceView, Need, NoPair, Pair

VIEW = InstanceView("x", "x:1", "layout", "digest")
PAIR = Pair(VIEW, (VIEW,))


@dataclass
class CountedLease:
    fleet: TokenFleet
    tokens: int

    def release(self) -> None:
        self.fleet.free += self.tokens


@dataclass
class TokenFleet:
    """Room for so many tokens; a reason overrules."""

    free: int = 100
    reason: NoPair | None = None
    asked: list[frozenset[str]] = field(default_factory=list)

    def choose(self, need: Need, excluded: frozenset[str] = frozenset()) -> Pair | NoPair:
        self.asked.append(excluded)
        if self.reason is not None:
            return self.reason
        return PAIR if need.max_tokens <= self.free else NoPair.FULL

    def lease(self, pair: Pair, need: Need) -> CountedLease:
        self.free -= need.max_tokens
        return CountedLease(self, need.max_tokens)


def admission(fleet: TokenFleet, **limits: float) -> Admission:
    return Admission(replace(AdmissionConfig(), **limits), fleet)  # type: ignore[arg-type]


def need(tokens: int) -> Need:
    return Need(1, tokens)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def waiting(queue: Admission, tokens: int) -> asyncio.Task[Placement]:
    task = asyncio.create_task(queue.place(need(tokens)))
    await settle()
    return task


async def test_a_request_that_fits_starts_at_once() -> None:
    queue = admission(TokenFleet())
    placement = await queue.place(need(10))
    assert placement.pair is PAIR
    assert queue.n_in_flight == 1
    queue.release(placement)
    assert queue.n_in_flight == 0


async def test_waiters_start_in_order_of_arrival_when_room_appears() -> None:
    queue = admission(TokenFleet(free=10))
    first = await queue.place(need(10))
    second, third = await waiting(queue, 10), await waiting(queue, 10)
    queue.release(first)
    placement = await second
    assert not third.done()
    queue.release(placement)
    queue.release(await third)


async def test_a_smaller_request_may_pass_but_only_so_often() -> None:
    fleet = TokenFleet(free=10)
    queue = admission(fleet)
    small = await queue.place(need(1))
    big = await waiting(queue, 10)
    for _ in range(MAX_SKIPS):
        queue.release(await queue.place(need(1)))
    late = await waiting(queue, 1)
    assert not late.done()
    queue.release(small)
    queue.release(await big)
    queue.release(await late)


async def test_a_full_queue_refuses_at_once_with_a_hint() -> None:
    queue = admission(TokenFleet(free=0), max_queue=1)
    waiter = await waiting(queue, 1)
    with pytest.raises(QueueFull) as refused:
        await queue.place(need(1))
    assert refused.value.code == "queue_full"
    assert refused.value.retry_after_s >= 1
    assert queue.queue_depth == 1
    waiter.cancel()


async def test_a_wait_ends_after_the_queue_timeout() -> None:
    queue = admission(TokenFleet(free=0), queue_timeout_s=0.01)
    with pytest.raises(DeadlineExceeded) as refused:
        await queue.place(need(1))
    assert refused.value.code == "queue_timeout"
    assert queue.queue_depth == 0


async def test_in_flight_is_bounded_even_when_instances_have_room() -> None:
    queue = admission(TokenFleet(), max_in_flight=1)
    first = await queue.place(need(1))
    second = await waiting(queue, 1)
    assert not second.done()
    queue.release(first)
    queue.release(await second)


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (NoPair.NO_DECODE, Unavailable),
        (NoPair.NO_PREFILL, Unavailable),
        (NoPair.NEVER_FITS, RequestRejected),
    ],
)
async def test_hopeless_requests_do_not_wait(reason: NoPair, error: type[Exception]) -> None:
    queue = admission(TokenFleet(reason=reason))
    with pytest.raises(error) as refused:
        await queue.place(need(1))
    assert refused.value.code == reason.value  # type: ignore[attr-defined]
    assert queue.queue_depth == 0


async def test_a_cancelled_waiter_leaves_and_gives_back_what_it_was_given() -> None:
    fleet = TokenFleet(free=1)
    queue = admission(fleet)
    first = await queue.place(need(1))
    second = await waiting(queue, 1)
    second.cancel()
    queue.release(first)  # given to the second in the same turn in which it is cancelled
    await asyncio.gather(second, return_exceptions=True)
    assert (queue.queue_depth, queue.n_in_flight, fleet.free) == (0, 0, 1)


async def test_excluded_instances_reach_the_choice() -> None:
    fleet = TokenFleet()
    queue = admission(fleet)
    queue.release(await queue.place(need(1), frozenset({"d1"})))
    assert fleet.asked == [frozenset({"d1"})]
