"""How stories of requests at a decode instance are told: a `World` with scripted prefills, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from decode_svc.caller import CandidateFailed, Event, Tokens
from tests.sim.decode_world import World, ids
from tests.sim.virtual_time import run

Story = Callable[[World], Coroutine[Any, Any, None]]


def now() -> float:
    return asyncio.get_running_loop().time()


def play(story: Story, **sizes: Any) -> World:
    async def whole() -> World:
        world = World(**sizes)
        await world.play(story)
        return world

    return run(whole())


def tokens(events: list[Event]) -> list[int]:
    return [i for event in events if isinstance(event, Tokens) for i in ids(event.tokens)]


def failures(events: list[Event]) -> list[tuple[str, str]]:
    return [(e.instance_id, e.reason) for e in events if isinstance(e, CandidateFailed)]
