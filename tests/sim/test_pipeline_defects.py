"""Defects that pipelines of other projects had, by name: each smallest case, as it must be here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3.cache.layout import build_layout
from k3.config import speculation
from k3.config.tree import EngineConfig, ParallelConfig, SpecConfig
from k3.model import dspark_spec
from k3.model.k3 import stage_tensor_names
from k3.model.registry import open_stage
from k3.model.spec import K3Spec
from k3.parallel.collectives import solo_groups
from k3.parallel.frame import EMBEDDING_TAP, Frame
from k3.parallel.mesh import Mesh
from prefill_svc.core.scheduler import Policy, PrefillScheduler
from tests.model_runner import CPU, OPS, Pools

pytestmark = pytest.mark.prefill

NANO = Path(__file__).parents[1] / "golden" / "k3"
SPEC = K3Spec.from_folder(NANO)


def test_a_middle_chunk_that_completes_after_the_final_one_was_planned_ends_nothing() -> None:
    """What a plan covers is frozen in it: the prompt's live fields have moved on."""
    policy = Policy(
        token_budget=8, max_inflight=2, chunk_align=4, max_running=1, max_queue=1, short_len=8
    )
    s = PrefillScheduler(policy, n_pages=6, n_slots=1, page_tokens=4)
    request = s.submit(1, 21, 0.0)
    first, second = s.plan(0.0), s.plan(0.0)
    assert first is not None
    assert second is not None
    s.advance(first.step_id, [])
    final = s.plan(0.0)
    assert final is not None
    assert [chunk.is_final for chunk in final.chunks] == [True]
    (completed,) = s.advance(second.step_id, [])
    assert not completed.is_final
    assert s.n_running == 1, "the prompt still runs"
    assert request.remaining == 0
    with pytest.raises(AssertionError, match="drew tokens"):
        s.advance(final.step_id, [])


@pytest.mark.parametrize("form", ["snapshots", "replay"])
def test_every_stage_keeps_what_a_group_needs_whether_it_drafts_or_not(form: str) -> None:
    """Sizes follow the run's drafts, not whether this stage has the drafter."""
    k = 3
    config = EngineConfig(
        role="decode",
        parallel=ParallelConfig(pp=3),
        spec=replace(SpecConfig(draft_tokens=k), kda_rollback=form),
    )
    for stage in range(3):
        layout = build_layout(
            SPEC,
            Mesh(3),
            stage,
            page_tokens=4,
            dtype="float32",
            columns=speculation.snapshots(config),
            records=speculation.records(config),
        )
        assert layout.rollback.group == k + 1
        field = layout.field("kda")
        assert field is not None
        assert field.columns == (k + 1 if form == "snapshots" else 1)


def test_the_list_of_what_a_stage_loads_belongs_to_that_stage() -> None:
    names = frozenset({"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"})
    last = Mesh(2).place(1)
    before = stage_tensor_names(SPEC, last, names, False)
    stage_tensor_names(SPEC, last, names, True).clear()
    assert stage_tensor_names(SPEC, last, names, False) == before
    assert "model.embed_tokens.weight" not in before
    assert "model.embed_tokens.weight" in stage_tensor_names(SPEC, last, names, True)
    assert isinstance(dspark_spec.SHARED, tuple)


def test_an_embedding_that_is_kept_for_the_drafter_is_no_tap() -> None:
    """The last stage's table never runs in the target's forward: its `-1` column is the one it received."""
    stage = open_stage(
        NANO,
        Mesh(2).place(1),
        solo_groups(),
        OPS,
        dtype="float64",
        device=CPU,
        taps=(EMBEDDING_TAP, 7),
        shared_embedding=True,
    )
    assert stage.embed is not None
    pools = Pools(stage, 1, 8)
    batch = pools.chunk_batch([(pools.requests[0], [1, 2, 3, 4, 5])])
    incoming = Frame.empty(stage.in_layout, 5, stage.dtype, CPU)
    generator = torch.Generator().manual_seed(3)
    incoming.data_TUH.copy_(
        torch.randn(incoming.data_TUH.shape, generator=generator, dtype=stage.dtype)
    )
    stage.embed(torch.tensor([9, 9, 9]))  # as a draft step does
    frame = stage.forward(incoming, pools.caches, batch).frame
    assert torch.equal(frame.tap_TH(EMBEDDING_TAP), incoming.tap_TH(EMBEDDING_TAP))
    assert frame.layout.taps == (EMBEDDING_TAP, 7)


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # and with it, new tensors are filled
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("stream", ["prefix", "mixture"])
def test_every_unit_of_a_frame_is_written_by_its_stage(stream: str) -> None:
    """Residual, bank and taps, those of other stages and its own: nothing is left of the memory's last use."""
    n_tokens, taps = 5, (6, EMBEDDING_TAP, 1, SPEC.num_layers - 1)
    frame: Frame | None = None
    for number in range(3):
        place = Mesh(3).place(number)
        stage = open_stage(
            NANO,
            place,
            solo_groups(),
            OPS,
            dtype="float64",
            device=CPU,
            taps=taps,
            tap_stream=stream,
        )
        assert Frame.empty(stage.out_layout, n_tokens, stage.dtype, CPU).data_TUH.isnan().all()
        pools = Pools(stage, 1, 8)
        batch = pools.chunk_batch([(pools.requests[0], [1, 2, 3, 4, 5])])
        frame = stage.forward(frame, pools.caches, batch).frame
        assert frame.data_TUH.isfinite().all(), f"stage {number}"
        n_own = len(frame.layout.taps)
        assert n_own == len(taps) or not place.is_last


def test_pairs_that_may_run_over_stages_are_listed_beside_the_models() -> None:
    assert ("kimi_k3", dspark_spec.METHOD) in dspark_spec.PIPELINE_PAIRS
    assert ("kimi_k31", dspark_spec.METHOD) in dspark_spec.PIPELINE_PAIRS
