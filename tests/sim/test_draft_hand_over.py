"""How a request's drafter starts: on the rows prefill handed over, or cold where they are late, missing or foreign.

Real intake and scheduler over scripted ranks and prefills, on a virtual clock. Whatever becomes of the rows, the
request runs at once, in its own ring, and is counted by how its drafter started.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from decode_svc.intake.attempt import DRAFT_PATIENCE_S
from k3.model.spec import K3Spec
from k3.telemetry.metric_sets import BOOTSTRAPS
from k3.v1 import prefill_pb2
from tests.drafters import random_drafter
from tests.sim.decode_world import NANO, Call, World
from tests.sim.intake_story import play, tokens

pytestmark = pytest.mark.dspark

LATE_S = 2 * DRAFT_PATIENCE_S


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter") / "mla"
    return random_drafter(folder, K3Spec.from_folder(NANO), "mla", 11)


@pytest.mark.parametrize(
    ("is_same", "sent", "arrive_after_s", "kind"),
    [
        (True, True, 0.0, "transferred"),
        (True, True, DRAFT_PATIENCE_S / 2, "transferred"),
        (True, True, LATE_S, "cold"),
        (True, True, None, "cold"),
        (True, False, 0.0, "cold"),
        (False, True, 0.0, "cold"),
    ],
    ids=["there", "a little late", "too late", "missing", "not sent", "foreign"],
)
def test_rows_that_are_not_there_mean_a_cold_start(
    drafter: Path, is_same: bool, sent: bool, arrive_after_s: float | None, kind: str
) -> None:
    """is_same: prefill has our drafter. sent: what it says. arrive_after_s: records of draft rows, after the others."""
    named: list[prefill_pb2.Destination] = []

    async def hand_over(call: Call) -> None:
        named.append(destination := await call.accept())
        call.prefilled()
        call.committed(destination, draft_valid=sent)
        ranks, transfer_id = call.world.ranks, destination.transfer_id
        ranks.arrive(transfer_id, draft_complete=arrive_after_s == 0)
        if arrive_after_s:
            await asyncio.sleep(arrive_after_s)
            ranks.arrive(transfer_id, draft_complete=True)
        await call.wait_for("received")
        call.end()

    async def story(world: World) -> None:
        world.sends_draft = is_same
        world.scripts["a:1"] = [hand_over]
        assert len(tokens(await world.drain(world.generate(m=4)))) == 4
        await world.settle()

    world = play(story, drafter=drafter, pages=40)
    [destination] = named
    assert destination.HasField("draft_slot") == is_same
    [opened] = [row for plan in world.ranks.plans for row in plan.open_rows]
    assert opened.draft_valid == (kind == "transferred")
    assert opened.draft_slot == opened.state_slot == destination.state_slot
    sample = world.metrics.registry.get_sample_value
    for other in BOOTSTRAPS:
        assert sample("k3_draft_bootstrap_total", {"kind": other}) == (other == kind)
        n_groups = sample("k3_spec_accept_length_count", {"bootstrap": other})
        assert n_groups == (3 if other == kind else 0)
