"""Drafters by Triton's kernels in a whole engine, in the interpreter; the operations one by one: test_draft_ops.py."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from k3_kernels.api import Projection, ReferenceDense
from k3_kernels.triton import draft_attend
from k3_kernels.triton.dense_ops import TritonDense
from k3_kernels.triton.products import Product
from safetensors.torch import save_file
from torch import Tensor

from k3.config.resolve import EMBEDDED_MODEL
from k3.model.dspark_spec import DraftSpec
from k3.model.registry import open_stage
from k3.model.spec import K3Spec
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import SOLO
from k3.types import SamplingParams
from tests.draft_rings import World
from tests.drafters import LocalEngine, random_drafter
from tests.model_runner import CPU, OPS

pytestmark = pytest.mark.dspark
NANO = Path(__file__).parents[2] / "golden/k3"
BLOCK = 5


def test_a_layer_too_large_for_a_program_is_computed_part_by_part(tmp_path: Path) -> None:
    spec = K3Spec.from_folder(EMBEDDED_MODEL)
    folder = random_drafter(tmp_path, spec, "mla", seed=5, block=BLOCK)
    config = json.loads((folder / "config.json").read_text())
    config["kv_lora_rank"] = 2 * draft_attend.WIDEST["latent"]
    large = DraftSpec.from_config(config)
    random = torch.Generator().manual_seed(1)
    shapes = {name: shape for name, (shape,) in large.tensors(confidence=False).items()}
    save_file(
        {name: torch.randn(*shape, generator=random) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    drafter = World.of(folder, TritonDense(), torch.float32, BLOCK).drafter
    assert not drafter.reads_rings(1)
    assert drafter.rows is not None


class TargetByTorch(ReferenceDense, TritonDense):
    """The kernels for drafts alone: in the interpreter the target's would take minutes."""

    def projection(self, weight_OI: Tensor) -> Projection:
        return Product.of(weight_OI)


CHAIN = (431, 339, 101, 459, 329, 261, 137, 71, 440)
EMITTED = [*pairwise(CHAIN), (5, 5)]  # by the model after the prompts below


HOW = {
    "greedy": [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logit_bias={5: 9.0}),
    ],
    "drawn": [
        SamplingParams(temperature=0.05, top_p=0.9, seed=7),
        SamplingParams(temperature=0.05, top_k=9, seed=8, logit_bias={5: 9.0}),
    ],
}


@pytest.mark.parametrize(
    ("flavour", "how"), [("mla", "greedy"), ("gqa", "greedy"), ("mla", "drawn")]
)
def test_a_speculating_engine_drafts_and_emits_the_same(
    tmp_path: Path, flavour: str, how: str
) -> None:
    """Followers as the model has them, so that drafts are accepted; biased logits: the judge reads edited ones."""
    spec = K3Spec.from_folder(NANO)
    folder = random_drafter(tmp_path, spec, flavour, 9, block=3, follows=EMITTED)
    taps = DraftSpec.from_folder(folder).taps
    stages = (
        open_stage(NANO, SOLO, solo_groups(), ops, dtype="float32", device=CPU, taps=taps)
        for ops in (replace(OPS, dense=TargetByTorch()), OPS)
    )
    ours, reference = (
        LocalEngine(
            stage, 2, 40, drafter=folder, draft_tokens=3, window=8, dtype="float32"
        ).generate([list(range(3, 12)), [9, 4]], 9, HOW[how])
        for stage in stages
    )
    assert [a.ids for a in ours] == [a.ids for a in reference]
    assert [a.accepted for a in ours] == [a.accepted for a in reference]
    assert all(any(a.accepted) for a in ours)
