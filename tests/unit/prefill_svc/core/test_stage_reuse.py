"""The real model behind the prefix cache: what a hit leaves in pages, states and draft rows is what a cold run leaves.

Prompts of one family come in waves over pools so small that pages and states are evicted all the time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3.cache.hash_chain import page_hashes, root
from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.model.dspark import open_context
from k3.model.dspark_spec import DraftSpec
from k3.model.k3 import Stage
from k3.model.registry import open_stage
from k3.model.spec import K3Spec
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import SOLO
from k3.sampling import RowSampling
from k3.types import SamplingParams
from prefill_svc.core.checkpoints import NO_SLOT, Mode
from prefill_svc.core.ladder import Ladder
from prefill_svc.core.scheduler import Chunk, Policy, PrefillScheduler
from prefill_svc.core.stage import ChunkStage, FirstToken, StageChunk
from tests.drafters import random_drafter
from tests.model_runner import CPU, OPS

pytestmark = [pytest.mark.prefill, pytest.mark.dspark]

NANO = Path(__file__).parents[3] / "golden" / "k3"
P, N_PAGES = 8, 20
GREEDY = FirstToken(RowSampling(SamplingParams(temperature=0.0)))
BASE = tuple(random.Random(1).randrange(512) for _ in range(100))


def family() -> list[tuple[int, ...]]:
    """Prompts that share 0, 20, ... tokens, on and around pages and rungs; some come again."""
    rng = random.Random(2)
    shared = (100, 20, 64, 96, 0, 65, 33, 100, 8, 100)
    return [
        (*BASE[:n], *(rng.randrange(512) for _ in range(1 + i % 4 * 7)))
        for i, n in enumerate(shared)
    ]


@dataclass(frozen=True)
class Computed:
    """What one prompt leaves: rows of its pages, its state, and the first token."""

    token: int
    latents: Tensor
    state: Tensor
    draft: Tensor


class Rig:
    """One rank and the scheduler before it; plans in flight are executed at once."""

    def __init__(self, stage: Stage, drafter: Path, *, mode: Mode | None, n_slots: int) -> None:
        policy = Policy(
            token_budget=40,
            max_inflight=2,
            chunk_align=P,
            max_running=3,
            max_queue=20,
            short_len=16,
        )
        self.mode = mode
        self.scheduler = PrefillScheduler(
            policy,
            n_pages=N_PAGES,
            n_slots=n_slots,
            page_tokens=P,
            ladder=Ladder(P, 2 * P, has_anchor=True) if mode else None,
            mode=mode or Mode.FORK_AT_SCHEDULE,
        )
        draft = DraftSpec.from_folder(drafter)
        layout = build_layout(stage.spec, SOLO.mesh, 0, page_tokens=P, dtype="float64", draft=draft)
        self.storage = Storage(layout, N_PAGES, n_slots, CPU, fill_nan=True)
        context = open_context(drafter, SOLO.shard, dtype="float64", device=CPU, ops=OPS.dense)
        self.stage = ChunkStage(stage, self.storage, P, context)

    def compute(self, prompts: list[tuple[int, ...]]) -> list[Computed]:
        """All at once, as far as there is room."""
        done: dict[int, Computed] = {}
        for key, prompt in enumerate(prompts):
            chain = page_hashes(root("rig", P), prompt, P) if self.mode else ()
            self.scheduler.submit(key, len(prompt), 0.0, chain=chain)
        while len(done) < len(prompts):
            plan = self.scheduler.plan(0.0)
            assert plan is not None
            chunks = [_stage_chunk(chunk, prompts[chunk.key]) for chunk in plan.chunks]
            outputs = self.stage.run(plan.step_id, chunks, lambda: None).outputs
            finals = [(c.key, c.epoch) for c in plan.chunks if c.is_final]
            self.scheduler.advance(plan.step_id, finals)
            for chunk, output in zip(plan.chunks, outputs, strict=True):
                if chunk.is_final:
                    assert output.token is not None
                    done[chunk.key] = self.left(chunk, output.token.id)
                    self.scheduler.release(chunk.key)
        return [done[key] for key in range(len(prompts))]

    def left(self, chunk: Chunk, token: int) -> Computed:
        pages, pools = list(chunk.pages), self.storage.pools
        return Computed(
            token,
            pools["latent"][pages].clone(),
            torch.cat([pools[name][chunk.write_slot].flatten() for name in ("kda", "conv")]),
            pools["draft"][pages].clone(),
        )


def _stage_chunk(chunk: Chunk, ids: tuple[int, ...]) -> StageChunk:
    return StageChunk(
        start=chunk.start,
        token_ids=ids[chunk.start : chunk.end],
        pages=chunk.pages,
        read_slot=chunk.read_slot,
        write_slot=chunk.write_slot,
        first=GREEDY if chunk.is_final else None,
        copy_slot=None if chunk.copy_slot == NO_SLOT else chunk.copy_slot,
    )


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_drafter(tmp_path_factory.mktemp("mla"), K3Spec.from_folder(NANO), "mla", seed=4)


@pytest.fixture(scope="module")
def stage(drafter: Path) -> Stage:
    taps = DraftSpec.from_folder(drafter).taps
    return open_stage(NANO, SOLO, solo_groups(), OPS, dtype="float64", device=CPU, taps=taps)


@pytest.fixture(scope="module")
def cold(stage: Stage, drafter: Path) -> list[Computed]:
    """Each prompt alone, without a cache."""
    rig = Rig(stage, drafter, mode=None, n_slots=1)
    return [rig.compute([prompt])[0] for prompt in family()]


@pytest.mark.parametrize(
    ("mode", "n_slots"),
    [(Mode.FORK_AT_SCHEDULE, 16), (Mode.FORK_HOLD, 5), (Mode.COPY, 16)],
    ids=lambda value: value.value if isinstance(value, Mode) else f"{value}-slots",
)
def test_a_warm_prompt_leaves_what_a_cold_one_leaves(
    stage: Stage, drafter: Path, cold: list[Computed], mode: Mode, n_slots: int
) -> None:
    rig = Rig(stage, drafter, mode=mode, n_slots=n_slots)
    prompts = family()
    for wave in range(0, len(prompts), 5):
        warm = rig.compute(prompts[wave : wave + 5])
        for prompt, got, expected in zip(prompts[wave:], warm, cold[wave:], strict=False):
            what = f"prompt of {len(prompt)} tokens in wave {wave}"
            assert got.token == expected.token, what
            for name in ("latents", "state", "draft"):
                torch.testing.assert_close(
                    getattr(got, name), getattr(expected, name), atol=1e-9, rtol=1e-9, msg=what
                )
    counts = rig.scheduler.cache.totals()
    assert 0 < counts["hit_tokens"] <= counts["wanted_tokens"]
    assert counts["orphaned"] + counts["evicted"] > 0
    slots = rig.scheduler.slot_counts()
    assert (slots.held, slots.pinned) == (0, 0)
