"""R9, R11, R18, R24, R25, R32, R39: what holds for every call, every backend and every rank."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import k3_kernels
import pytest
import torch
from k3_kernels.api import AttentionOps
from safetensors.torch import load_file, save_file

import decode_svc
from decode_svc.ledger import Ledger
from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.model.registry import open_stage
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from k3.v1 import plan_pb2
from tests.compare import assert_close
from tests.decode_group import DecodeGroup, Model
from tests.model_runner import CPU, OPS, Pools, solo_stage
from tests.thread_group import mesh_groups
from tests.unit.decode_svc.helix.test_positions import Rank
from tests.unit.parallel.worker import NANO

pytestmark = pytest.mark.helix

SPEC = K3Spec.from_folder(NANO)


def test_r9_every_module_of_the_decode_side_imports() -> None:
    """No leaked definition that fails when it is reached; type checks and linters see the bodies."""
    for name in (m.name for m in pkgutil.walk_packages(decode_svc.__path__, "decode_svc.")):
        if not name.endswith("__main__"):
            importlib.import_module(name)


def test_r11_tables_are_derived_into_the_same_memory() -> None:
    rank = Rank(Ledger(4, 2), 0, drafts=2)
    rank.open(1, 9)

    def addresses() -> list[int]:
        verify = rank.derive(1).verify
        tensors = (
            verify.token_ids_T,
            verify.page_table_BW,
            verify.slot_T,
            verify.bound_T,
            verify.state_slots_B,
            verify.read_column_B,
        )
        return [tensor.data_ptr() for tensor in tensors]

    first = addresses()
    rank.commit(rank.derive(1), accepted=1)
    assert addresses() == first


def _attention_classes() -> list[type]:
    found: list[type] = []
    for module in pkgutil.walk_packages(k3_kernels.__path__, "k3_kernels."):
        if ".triton" in module.name:
            pytest.importorskip("triton")
        members = inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
        found += [kind for _, kind in members if kind.__module__ == module.name]
    return [
        kind for kind in found if kind is not AttentionOps and {"decode", "plan"} <= set(dir(kind))
    ]


def test_r18_every_attention_backend_takes_the_arguments_of_the_interface() -> None:
    """Bounds are never optional: they are part of the plan, and the plan of every call."""
    classes = _attention_classes()
    assert classes
    for kind in classes:
        for name in ("write", "plan", "decode", "pack", "merge_packed"):
            wanted = list(inspect.signature(getattr(AttentionOps, name)).parameters)[1:]
            given = [p for p in inspect.signature(getattr(kind, name)).parameters if p != "self"]
            assert len(given) == len(wanted), f"{kind.__name__}.{name}: {given} for {wanted}"
    assert "bound_T" in inspect.signature(AttentionOps.plan).parameters


def test_r24_a_vision_tower_whose_heads_fit_no_mesh_is_nobodys_concern(tmp_path: Path) -> None:
    tensors = load_file(NANO / "model.safetensors")
    tensors["vision_tower.encoder.blocks.0.wqkv.weight"] = torch.zeros(3 * 12 * 5, 7)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((NANO / "config.json").read_text())
    mesh = Mesh(cp=4)
    groups = mesh_groups(mesh)
    stage = open_stage(tmp_path, mesh.place(3), groups[3], OPS, dtype="float32", device=CPU)
    assert len(stage.layers) == SPEC.num_layers


def test_r25_a_decode_rank_computes_no_prompt_and_counts_no_prompt_token() -> None:
    """Mixed batches do not exist: a plan with chunks is refused before anything of it is looked at."""
    model = Model.open(NANO, Mesh(), dtype="float32")
    group = DecodeGroup(model, max_rows=2, max_len=16, depth=1, draft_tokens=0)
    chunk = plan_pb2.ChunkRow(request=1, epoch=1, start=0, token_ids=[1, 2, 3, 4])
    rows = [plan_pb2.VerifyRow(row=row, base_bound=3) for row in (1, 2)]
    plan = plan_pb2.StepPlan(step_id=1, chunks=[chunk], verify_rows=rows, group_len=1)
    with pytest.raises(ValueError, match="1 chunks and 2 verify rows"):
        group.ranks[0].launch(plan)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_r32_the_budget_is_what_was_configured_no_more_and_no_page_less(cp: int) -> None:
    budget, n_slots = 1_000_000, 3
    layout = build_layout(SPEC, Mesh(cp=cp), 0, page_tokens=16, dtype="float32")

    def pool_bytes(n_pages: int) -> int:
        storage = Storage(layout, n_pages, n_slots, CPU)
        return sum(pool.nbytes for pool in storage.pools.values())

    pages = layout.pages_for(budget, n_slots)
    assert pool_bytes(pages) <= budget < pool_bytes(pages + 1)


def test_r39_after_all_drafts_are_rejected_the_state_is_that_of_one_token() -> None:
    ids, wrong = [5, 400, 3, 77, 12, 9], [8, 8, 8]
    stage = solo_stage(NANO, "float64")

    def last_logits(groups: list[tuple[list[int], int]]) -> torch.Tensor:
        pools = Pools(stage, 1, 32, columns=4)
        request = pools.requests[0]
        pools.prefill(request, ids[:3], 3)
        for tokens, accepted in groups:
            logits = pools.verify([(request, tokens)], [accepted])
        return logits[0, 0]

    rejected = last_logits([([ids[3], *wrong], 0), ([ids[4], *wrong], 0), ([ids[5], *wrong], 0)])
    whole = Pools(stage, 1, 32)
    plain = whole.prefill(whole.requests[0], ids, len(ids))[-1]
    assert_close(rejected, plain, 1e-10, "logits after rejected drafts")
