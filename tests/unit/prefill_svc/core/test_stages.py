"""Chunks over pipeline stages: tokens, caches, taps and draft rows are bit for bit those of one stage.

Real stages on threads, frames by queues, plans of mixed prompts as the scheduler makes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.errors import GroupFailed
from k3.model.dspark import open_context
from k3.model.dspark_spec import DraftSpec
from k3.model.registry import open_stage
from k3.model.spec import K3Spec
from k3.parallel.collectives import Collectives, Pending, SoloCollectives
from k3.parallel.frame import HEADER_BYTES
from k3.parallel.mesh import Mesh
from k3.sampling import RowSampling
from k3.types import SamplingParams
from prefill_svc.core.scheduler import Chunk, Policy, PrefillScheduler
from prefill_svc.core.stage import ChunkStage, FirstToken, StageChunk, StageStep
from tests.drafters import random_drafter
from tests.model_runner import CPU, OPS
from tests.thread_group import mesh_groups, run_group

pytestmark = pytest.mark.prefill

NANO = Path(__file__).parents[3] / "golden" / "k3"
P, N_PAGES, N_SLOTS, BUDGET = 8, 24, 4, 24
LENGTHS = (1, 7, 8, 9, 61)
GREEDY = FirstToken(RowSampling(SamplingParams(temperature=0.0)))
HIDDEN = K3Spec.from_folder(NANO).hidden_size
Step = list[StageChunk]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(17)
    return [torch.randint(0, 512, (n,), generator=generator).tolist() for n in LENGTHS]


def plans() -> list[Step]:
    """Chunks of all prompts as one scheduler plans them, several plans in flight."""
    policy = Policy(
        token_budget=BUDGET, max_inflight=3, chunk_align=P, max_running=4, max_queue=9, short_len=9
    )
    scheduler = PrefillScheduler(policy, n_pages=N_PAGES, n_slots=N_SLOTS, page_tokens=P)
    ids = prompts()
    for key, prompt in enumerate(ids):
        scheduler.submit(key, len(prompt), 0.0)
    made: list[Step] = []
    flying: deque[tuple[int, tuple[Chunk, ...]]] = deque()
    while True:
        plan = scheduler.plan(0.0)
        if plan is not None:
            made.append([_stage_chunk(chunk, ids[chunk.key]) for chunk in plan.chunks])
            flying.append((plan.step_id, plan.chunks))
            continue
        if not flying:
            return made
        step_id, chunks = flying.popleft()
        for chunk in scheduler.advance(step_id, [(c.key, c.epoch) for c in chunks if c.is_final]):
            if chunk.is_final and chunk.key < 2:  # the others' pages stay, to be compared
                scheduler.release(chunk.key)


def _stage_chunk(chunk: Chunk, ids: list[int]) -> StageChunk:
    return StageChunk(
        start=chunk.start,
        token_ids=tuple(ids[chunk.start : chunk.end]),
        pages=chunk.pages,
        read_slot=chunk.read_slot,
        write_slot=chunk.write_slot,
        first=GREEDY if chunk.is_final else None,
    )


Harm = Callable[[Tensor], None]  # to units 0 (residual), 1.. (bank, then taps) of [T, units, H]


class Harming(SoloCollectives):
    """A pipeline that spoils frames: shows that what it spoils is needed."""

    def __init__(self, pipeline: Collectives, harm: Harm) -> None:
        self.pipeline, self.harm = pipeline, harm

    def send(self, tensor: Tensor, to: int) -> Pending:
        n_tokens = int(tensor[:HEADER_BYTES].view(torch.int64)[2])
        self.harm(tensor[HEADER_BYTES:].view(torch.float64).view(n_tokens, -1, HIDDEN))
        return self.pipeline.send(tensor, to)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        return self.pipeline.recv(tensor, source)


@dataclass
class Ran:
    """What all ranks hold after all plans, by layer, and what the last stage said."""

    tokens: list[list[int | None]]
    latents: dict[int, Tensor]
    states: dict[int, Tensor]
    draft: Tensor


def run(mesh: Mesh, drafter: Path, harm: Harm | None = None) -> Ran:
    """harm: what happens to the data of every frame on its way."""
    groups, draft = mesh_groups(mesh), DraftSpec.from_folder(drafter)
    if harm is not None:
        groups = [replace(g, pipeline=Harming(g.pipeline, harm)) for g in groups]
    steps = plans()

    def body(rank: int) -> tuple[Storage, list[StageStep]]:
        place = mesh.place(rank)
        stage = open_stage(
            NANO,
            place,
            groups[rank],
            OPS,
            dtype="float64",
            device=CPU,
            taps=draft.taps,
            tap_stream=draft.tap_stream,
        )
        layout = build_layout(
            stage.spec, mesh, place.stage, page_tokens=P, dtype="float64", draft=draft
        )
        storage = Storage(layout, N_PAGES, N_SLOTS, CPU, fill_nan=True)
        context = None
        if place.is_last:
            context = open_context(drafter, place.shard, dtype="float64", device=CPU, ops=OPS.dense)
        runner = ChunkStage(stage, storage, P, context)
        return storage, [
            runner.run(step_id, chunks, lambda: None) for step_id, chunks in enumerate(steps, 1)
        ]

    ran = run_group(mesh.size, body)
    storages = [storage for storage, _ in ran]
    first_of_stage = storages[:: mesh.stage_size]
    pool = storages[mesh.rank(mesh.pp - 1)].draft
    assert pool is not None
    for storage, outcome in ran[: -mesh.stage_size]:
        assert storage.draft is None, "only the last stage keeps draft rows"
        assert all(step.outputs == () for step in outcome)
    return Ran(
        tokens=[
            [output.token.id if output.token else None for output in step.outputs]
            for step in ran[mesh.rank(mesh.pp - 1)][1]
        ],
        latents={i: t for s in first_of_stage for i, t in s.caches().latents.items()},
        states={i: t for s in first_of_stage for i, t in s.caches().states.items()},
        draft=pool,
    )


def assert_equal(got: Tensor, expected: Tensor, what: str) -> None:
    """Bit for bit, memory that nobody wrote included."""
    assert torch.equal(got.isnan(), expected.isnan()), what
    assert torch.equal(got.nan_to_num(), expected.nan_to_num()), what


@pytest.fixture(scope="module", params=[("mla", "mixture"), ("gqa", "prefix")], ids=lambda p: p[0])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Taps 4, -1 and 1, listed in this order: over nine stages 4 lies at a stage's end."""
    flavour, stream = request.param
    folder = tmp_path_factory.mktemp(flavour)
    return random_drafter(folder, K3Spec.from_folder(NANO), flavour, seed=4, stream=stream)


@pytest.fixture(scope="module")
def whole(drafter: Path) -> Ran:
    return run(Mesh(), drafter)


@pytest.mark.parametrize(
    "mesh",
    [Mesh(2), Mesh(4), Mesh(9), Mesh(3, partition=(1, 7, 1))],
    ids=["pp2", "pp4", "pp9", "1-7-1"],
)
def test_stages_give_the_bits_of_the_whole_model(mesh: Mesh, drafter: Path, whole: Ran) -> None:
    """Draft rows are a function of the taps: equal rows are equal taps, and equal acceptance later."""
    split = run(mesh, drafter)
    assert split.tokens == whole.tokens
    assert sum(token is not None for step in whole.tokens for token in step) == len(LENGTHS)
    for layer, expected in whole.latents.items():
        assert_equal(split.latents[layer], expected, f"latents of layer {layer}")
    for layer, expected in whole.states.items():
        assert_equal(split.states[layer], expected, f"states of layer {layer}")
    assert_equal(split.draft, whole.draft, "draft rows")


def drop_bank(frame_TUH: Tensor) -> None:
    frame_TUH[:, 1] = 0.0


def shift_taps(frame_TUH: Tensor) -> None:
    """The two relayed taps of a frame between layers 4 and 5 in the wrong order."""
    frame_TUH[:, -2:] = frame_TUH[:, -2:].flip(1)


def test_a_bank_that_is_dropped_shows_in_the_states_after_the_boundary(
    drafter: Path, whole: Ran
) -> None:
    """What must fail does: otherwise the equalities above would prove nothing."""
    spoilt, last = run(Mesh(2), drafter, drop_bank), max(whole.states)
    assert not torch.equal(spoilt.states[last].nan_to_num(), whole.states[last].nan_to_num())


@pytest.mark.dspark
def test_taps_in_another_order_show_in_the_draft_rows_alone(drafter: Path, whole: Ran) -> None:
    spoilt, written = run(Mesh(2), drafter, shift_taps), ~whole.draft.isnan()
    assert not torch.equal(spoilt.draft[written], whole.draft[written])
    for layer, expected in whole.states.items():
        assert_equal(spoilt.states[layer], expected, f"states of layer {layer}")


def test_stages_of_tensor_parallel_ranks_draw_the_same_tokens(drafter: Path, whole: Ran) -> None:
    split = run(Mesh(pp=2, tp=2), drafter)
    assert split.tokens == whole.tokens
    n_heads = split.draft.shape[1]  # of one rank, in the flavour with heads; latents are whole
    expected = whole.draft[:, :n_heads] if split.draft.dim() == 6 else whole.draft
    torch.testing.assert_close(split.draft, expected, atol=1e-9, rtol=0, equal_nan=True)


def test_a_stage_with_another_tap_list_refuses_the_frame_by_its_widths(drafter: Path) -> None:
    """Stage 0 sends no taps, stage 1 expects two: both widths are named, nothing is computed."""
    mesh = Mesh(2)
    groups = mesh_groups(mesh)

    def body(rank: int) -> str:
        taps = (-1, 1) if rank else ()
        place = mesh.place(rank)
        stage = open_stage(NANO, place, groups[rank], OPS, dtype="float64", device=CPU, taps=taps)
        layout = build_layout(stage.spec, mesh, rank, page_tokens=P, dtype="float64")
        runner = ChunkStage(stage, Storage(layout, N_PAGES, N_SLOTS, CPU), P)
        try:
            runner.run(1, plans()[0], lambda: None)
        except GroupFailed as error:
            return str(error)
        return ""

    sent, refused = run_group(2, body)
    assert sent == ""
    assert "FRAME_WIDTH: frame from rank 0 has taps 0 instead of 2" in refused
