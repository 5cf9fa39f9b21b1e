"""Whoever arrives while plans are in flight is planned at once where one more may be: nobody waits for an answer."""

from __future__ import annotations

import pytest

from tests.sim.decode_world import FIRST, World, until
from tests.sim.intake_story import play, tokens

pytestmark = pytest.mark.prefill


def test_a_prompt_that_arrives_beside_a_plan_in_flight_takes_the_free_stage() -> None:
    async def story(world: World) -> None:
        plans = world.ranks.plans
        first = world.generate(n=7, m=3)
        await until(lambda: len(plans) == 1)
        second = world.generate(n=5, m=3)
        await until(lambda: len(plans) == 2)
        assert world.ranks.n_answered == 0, "it waited for the answer of the plan before"
        assert [[c.request for c in plan.chunks] for plan in plans] == [[1], [2]]
        for caller in (first, second):
            assert tokens(await world.drain(caller)) == [FIRST, 101, 102]
        await world.settle()

    play(story, role="both", stages=2)


def test_a_request_whose_caches_are_complete_does_not_wait_for_an_answer_either() -> None:
    """The first one wants a single step, so that one of the two plans that may be in flight is free."""

    async def story(world: World) -> None:
        plans = world.ranks.plans
        first = world.generate("a:1", m=2)
        await until(lambda: len(plans) == 1)
        second = world.generate("b:1", m=2)
        await until(lambda: len(plans) == 2)
        assert world.ranks.n_answered == 0, "it waited for the answer of the plan before"
        assert [[row.row for row in plan.verify_rows] for plan in plans] == [[1], [2]]
        for caller in (first, second):
            assert tokens(await world.drain(caller)) == [FIRST, 101]
        await world.settle()

    play(story)
