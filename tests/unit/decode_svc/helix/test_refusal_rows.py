"""F1-F18: every combination that context-parallel decode refuses, or that its configuration has no words for.

A rule of `docs/refusals.md` speaks where a setting can say it. Where no setting exists the state cannot be reached: the
key is refused as unknown, by file, environment and command line alike, so nobody believes to have switched it on.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from k3_kernels.api import BackendError, Backends, select
from k3_kernels.reference.tables import verify_tables

from decode_svc.deployment import Deployment
from k3.cache.layout import build_layout
from k3.config.commandline import ENGINE_ALIASES, CommandLine, parse
from k3.config.load import load_engine
from k3.config.resolve import EMBEDDED_MODEL
from k3.config.tree import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from k3.errors import LayoutMismatch
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from k3.v1 import prefill_pb2
from tests.model_runner import CPU, OPS
from tests.resharding import make_draft
from tests.unit.parallel.worker import NANO

pytestmark = pytest.mark.helix

HELIX = {"parallel.cp": "2"}


def codes(flags: Mapping[str, str], role: str = "decode") -> set[str]:
    return {p.code for p in load_engine(role, CommandLine(dict(flags)), {}).problems}


# Row, key, a value somebody coming from another engine may write.
NO_WORDS = [
    ("F1", "spec.method", "eagle3"),
    ("F1", "spec.ngram", 4),
    ("F3", "spec.tree", [[0], [0, 0]]),
    ("F3", "spec.top_k", 4),
    ("F3", "schedule.beam_width", 4),
    ("F4", "cache.ledger", "per_rank"),
    ("F4", "parallel.cp_layout", "contiguous"),
    ("F5", "spec.acceptance_window", 64),
    ("F5", "spec.acceptance_threshold", 0.5),
    ("F6", "cache.dtype", "fp8_e4m3"),
    ("F9", "parallel.dp", 2),
    ("F9", "parallel.attention_dp", True),
    ("F10", "cache.host_bytes", "1GiB"),
    ("F10", "cache.disk_path", "/cache"),
    ("F10", "transfer.connector", "lmcache"),
    ("F13", "parallel.page_tokens", 32),
    ("F14", "parallel.moe_tp", 2),
    ("F14", "parallel.moe_ep", 2),
    ("F15", "spec.confidence_threshold", 0.8),
    ("F15", "spec.ragged", True),
    ("F16", "parallel.cp_ranks", [0, 3]),
]


@pytest.mark.parametrize(("row", "key", "value"), NO_WORDS, ids=lambda v: str(v)[:26])
def test_what_no_setting_can_say_is_refused_as_unknown_wherever_it_is_written(
    row: str, key: str, value: object, tmp_path: Path
) -> None:
    section, name = key.split(".")
    file = tmp_path / f"{row}.yaml"
    file.write_text(json.dumps({"parallel": {"cp": 2}} | {section: {name: value}}))
    text = json.dumps(value)
    found = load_engine("decode", CommandLine({}, file=file), {}).problems
    assert [(p.code, p.values) for p in found] == [("UNKNOWN_KEY", key)]
    variable = f"K3_{section}__{name}".upper()
    found = load_engine("decode", CommandLine(HELIX), {variable: text}).problems
    assert [(p.code, p.values) for p in found] == [("UNKNOWN_KEY", variable)]
    flag = f"--{section}-{name}".replace("_", "-")
    line = parse("k3-decode", EngineConfig, ENGINE_ALIASES, ["--cp", "2", flag, text])
    assert {p.code for p in line.problems} == {"UNKNOWN_FLAG"}


@pytest.mark.dspark
def test_f1_only_a_drafter_of_this_family_speculates(tmp_path: Path) -> None:
    for path in (EMBEDDED_MODEL / "draft-mla").iterdir():
        shutil.copy(path, tmp_path / path.name)
    flags = HELIX | {"spec.draft_tokens": "3", "spec.drafter": str(tmp_path)}
    assert codes(flags) == set()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "eagle3"}))
    assert codes(flags) == {"DRAFTER"}


@pytest.mark.dspark
def test_f5_f15_a_group_keeps_its_width_on_a_spread_ledger() -> None:
    drafting = HELIX | {"spec.draft_tokens": "3", "spec.drafter": "draft-mla"}
    assert codes(drafting) == set()
    assert "GATE_HELIX" in codes(drafting | {"spec.gate_window": "8"})
    assert "CONFIDENCE_HELIX" in codes(drafting | {"spec.draft_schedule": "confidence"})


@pytest.mark.dspark
def test_f2_a_drafter_inside_the_target_is_refused() -> None:
    flags = HELIX | {"spec.draft_tokens": "3", "spec.drafter": str(EMBEDDED_MODEL)}
    assert codes(flags) == {"DRAFTER"}


@pytest.mark.parametrize("dtype", ["fp8", "float8_e4m3fn", "int8"])
def test_f6_no_cache_is_quantised(dtype: str) -> None:
    assert codes(HELIX | {"model.dtype": dtype}) == {"VALUE"}


@pytest.mark.parametrize("name", ["flashmla", "triton", "flashinfer"])
def test_f7_a_gpu_attention_backend_is_refused_on_a_cpu_at_both_ends(name: str) -> None:
    on_cpu = HELIX | {"model.device": "cpu", "backends.attention": name}
    assert "GPU_ATTENTION" in codes(on_cpu)
    with pytest.raises(BackendError, match=name):
        select(Backends(attention=name), CPU)


@pytest.mark.parametrize("name", ["trtllm", "tokenspeed"])
def test_f7_an_unknown_attention_backend_is_refused_at_both_ends(name: str) -> None:
    assert codes(HELIX | {"backends.attention": name}) == {"VALUE"}
    with pytest.raises(BackendError, match=name):
        select(Backends(attention=name), CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_f8_every_backend_that_can_be_chosen_returns_contiguous_float32_lse(
    dtype: torch.dtype,
) -> None:
    base, group, heads, width = 5, 3, 2, 12
    pool = torch.randn(2, 4, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    valid = torch.ones(1, group, dtype=torch.bool)
    _, _, bound = verify_tables(torch.tensor([base]), table, valid, 4, 2, 1)
    plan = OPS.attention.plan(table, bound, group, int(bound.max()), 4)
    q = torch.ones(group, heads, width, dtype=dtype)
    _, lse = OPS.attention.decode(q, pool, plan, 0.3, 8)
    assert (lse.dtype, lse.shape, lse.is_contiguous()) == (torch.float32, (group, heads), True)


def test_f10_pages_are_not_reused_on_decode() -> None:
    assert "PREFIX_ON_DECODE" in codes(HELIX | {"cache.prefix": "on"})


@pytest.mark.parametrize("flavour", ["mla", "gqa"])
@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 4), (2, 2), (2, 4), (1, 8)])
def test_f11_a_drafters_cache_sees_context_ranks_as_tensor_ranks(
    tp: int, cp: int, flavour: str
) -> None:
    def draft_field(mesh: Mesh) -> object:
        spec, draft = K3Spec.from_folder(EMBEDDED_MODEL), make_draft(flavour)
        layout = build_layout(
            spec, mesh, 0, page_tokens=4, dtype="float32", draft=draft, draft_places=3
        )
        return layout.field("draft")

    mesh = Mesh(tp=tp, cp=cp)
    assert draft_field(mesh) == draft_field(mesh.repurposed())
    assert draft_field(mesh) is not None


def test_f12_no_prompt_is_computed_on_a_spread_ledger() -> None:
    assert "HELIX_PREFILL" in codes(HELIX, "prefill")
    assert "HELIX_BOTH" in codes(HELIX | {"role": "both"})


def test_f13_a_peer_with_pages_of_another_size_is_refused() -> None:
    def deployment(page_tokens: int) -> Deployment:
        config = EngineConfig(
            role="decode",
            model=ModelConfig(str(NANO), "nano", "float32", "cpu", 64),
            cache=CacheConfig(page_tokens=page_tokens, pages=12, state_slots=4),
            parallel=ParallelConfig(cp=2),
        )
        return Deployment.of(config, "digest")

    ours, theirs = deployment(4), deployment(8)
    answer = prefill_pb2.ConnectResponse(
        instance_id="prefill-0",
        layout_fingerprint=theirs.layout_fingerprint,
        geometry=theirs.geometry,
    )
    with pytest.raises(LayoutMismatch, match="page_tokens"):
        ours.check(answer)


@pytest.mark.parametrize("cp", ["3", "5", "16"])
def test_f14_ranks_that_do_not_divide_the_heads_are_refused(cp: str) -> None:
    assert codes({"parallel.cp": cp}) == {"HEADS"}


def test_f16_a_context_group_lies_inside_one_stage() -> None:
    """The mesh is the only source of groups, and cp is its minor axis: there is nothing to choose."""
    for pp, tp, cp in [(1, 1, 2), (1, 2, 4), (2, 2, 2), (3, 4, 3)]:
        mesh = Mesh(pp, tp, cp)
        stages = [set(ranks) for ranks in mesh.stage_groups()]
        groups = mesh.context_groups()
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        for ranks in groups:
            assert sum(set(ranks) <= stage for stage in stages) == 1
            assert len({mesh.place(rank).tp_rank for rank in ranks}) == 1


def test_f18_context_ranks_over_stages_are_refused() -> None:
    assert "HELIX_PIPELINE" in codes(HELIX | {"parallel.pp": "2"})
