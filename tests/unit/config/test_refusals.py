"""Every rule is violated once by exactly what it names, and says so with its values and a remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from k3.config import refusals
from k3.config.commandline import CommandLine
from k3.config.load import load_engine, load_router
from k3.config.resolve import EMBEDDED_MODEL
from k3.config.stages import mesh_of
from k3.model.digest import model_digest

pytestmark = [pytest.mark.helix, pytest.mark.dspark, pytest.mark.prefill]

DOCS = Path(__file__).parents[3] / "docs"
ALONE = {"role": "both"}
DRAFTING = {"spec.draft_tokens": "7", "spec.drafter": "draft-mla"}
ENGINE_CASES = [
    ("CHECKPOINTS_IDLE", "prefill", {"cache.checkpoint_interval": "64"}),
    (
        "CHECKPOINTS_BESIDE_SLOTS",
        "prefill",
        {"cache.prefix": "on", "cache.checkpoints": "4", "cache.state_slots": "99"},
    ),
    ("PREFILL_INSTANCES_IDLE", "decode", ALONE | {"schedule.max_early_prefills": "3"}),
    ("PREFILL_INSTANCES_IDLE", "decode", ALONE | {"serve.prefills": "prefill-0:50051"}),
    ("PREFILL_INSTANCES_IDLE", "decode", ALONE | {"parallel.pp_remote_kv": "true"}),
    ("PREFILL_INSTANCES_IDLE", "decode", ALONE | {"schedule.reserve_wait_s": "9s"}),
    ("PREFILL_INSTANCES_IDLE", "decode", ALONE | {"transfer.port_range": "41000-41050"}),
    ("MODEL_FOLDER", "prefill", {"model.path": "/nowhere"}),
    ("DEVICE", "prefill", {"model.device": "cuda"}),
    ("GPU_ATTENTION", "decode", {"model.device": "cpu", "backends.attention": "triton"}),
    ("SHARED_ON_GPU", "decode", {"model.device": "cuda", "backends.collectives": "shared"}),
    ("GRAPHS_ON_CPU", "decode", {"model.device": "cpu", "backends.graphs": "on"}),
    (
        "FLASHMLA_PAGES",
        "decode",
        {"backends.attention": "flashmla", "cache.page_tokens": "32"},
    ),
    ("HELIX_PREFILL", "prefill", {"parallel.cp": "2"}),
    ("HELIX_PIPELINE", "decode", {"parallel.cp": "2", "parallel.pp": "2"}),
    ("PP_REMOTE_KV", "decode", {"parallel.pp": "2"}),
    ("PP_CUDA_GRAPH", "decode", {"backends.graphs": "on", "parallel.pp": "2"}),
    ("HELIX_BOTH", "decode", {"role": "both", "parallel.cp": "2"}),
    ("LOCAL_PREFILL_CP", "decode", {"schedule.local_prefill_max": "64", "parallel.cp": "2"}),
    (
        "LOCAL_PREFILL_BUDGET",
        "decode",
        {"schedule.local_prefill_max": "64", "schedule.token_budget": "4"},
    ),
    ("LOCAL_PREFILL_ROLE", "decode", {"role": "both", "schedule.local_prefill_max": "64"}),
    ("DRAFTS_ON_PREFILL", "prefill", {"spec.draft_tokens": "7"}),
    ("DRAFTS_WITHOUT_DRAFTER", "decode", {"spec.draft_tokens": "7"}),
    ("DRAFT_WINDOW", "decode", {"spec.draft_window": "100"}),
    ("ACCEPTANCE_WITHOUT_DRAFTS", "decode", {"spec.acceptance": "block"}),
    ("GATE_WITHOUT_DRAFTS", "decode", {"spec.gate_window": "8"}),
    ("GATE_HELIX", "decode", DRAFTING | {"spec.gate_window": "8", "parallel.cp": "2"}),
    ("GATE_PIPELINE", "decode", DRAFTING | {"spec.gate_window": "8", "parallel.pp": "2"}),
    (
        "CONFIDENCE_WITHOUT_DRAFTS",
        "decode",
        {"spec.draft_schedule": "confidence"},
    ),
    (
        "CONFIDENCE_HELIX",
        "decode",
        DRAFTING | {"spec.draft_schedule": "confidence", "parallel.cp": "2"},
    ),
    ("CONFIDENCE_UNCALIBRATED", "decode", DRAFTING | {"spec.draft_schedule": "confidence"}),
    ("CALIBRATION_UNUSED", "decode", {"spec.calibration": "/nowhere"}),
    ("CALIBRATION", "decode", DRAFTING | {"spec.calibration": "/nowhere", "spec.gate_window": "8"}),
    (
        "PP_CONFIDENCE",
        "decode",
        DRAFTING | {"spec.draft_schedule": "confidence", "parallel.pp": "2"},
    ),
    ("DRAFTER", "prefill", {"spec.drafter": "/nowhere"}),
    ("DRAFTER", "decode", {"spec.draft_tokens": "8", "spec.drafter": "draft-mla"}),
    ("PREFIX_ON_DECODE", "decode", {"cache.prefix": "on"}),
    ("PREFIX_INTERVAL", "prefill", {"cache.prefix": "on", "cache.checkpoint_interval": "15"}),
    ("PAGE_TOKENS", "decode", {"cache.page_tokens": "48"}),
    ("STATE_SLOTS", "decode", {"cache.state_slots": "1"}),
    ("BUDGET_PAGE", "prefill", {"schedule.token_budget": "15"}),
    ("CHUNK_COSTS", "prefill", {"schedule.chunk_costs": "1,2,3"}),
    ("CHUNK_COSTS", "prefill", {"schedule.chunk_costs": "1,2,0,0"}),
    ("CHUNK_COSTS", "prefill", {"schedule.chunk_costs": "1,2,nan,3"}),
    ("CHUNK_COSTS", "decode", {"schedule.chunk_costs": "1", "schedule.local_prefill_max": "64"}),
    ("FENCE_CLOCKS", "decode", {"transfer.lease_s": "25s"}),
    ("HEARTBEAT_CLOCK", "prefill", {"transfer.heartbeat_s": "8s"}),
    ("PROGRESS_CLOCK", "decode", {"transfer.progress_timeout_s": "9s"}),
    ("PORT_RANGE", "prefill", {"transfer.port_range": "50000-50100"}),
    ("PORT_RANGE", "prefill", {"transfer.port_range": "41050-41000"}),
    ("PORT_RANGE", "prefill", {"transfer.port_range": "any"}),
    ("PORT_RANGE", "prefill", {"transfer.port_range": "80-90"}),
    ("SAME_PORT", "prefill", {"serve.ops_port": "50051"}),
    ("SAME_PORT", "prefill", {"serve.ops_port": "50051", "serve.ops_host": "0.0.0.0"}),
    ("PREFILL_PATTERNS", "decode", {"serve.prefills": "somewhere"}),
    ("PREFILL_PATTERNS", "decode", {"serve.prefills": "*:65536"}),
    ("TLS_PAIR", "decode", {"serve.tls_cert": __file__}),
    ("TLS_FILES", "decode", {"serve.tls_ca": "/nowhere"}),
    ("TLS_FILES", "decode", {"serve.tls_ca": __file__}),
    ("TLS_FILES", "prefill", {"serve.tls_cert": __file__, "serve.tls_key": __file__}),
    ("TLS_CLIENT_AUTH", "decode", {"serve.tls_client_auth": "true"}),
    ("HEADS", "decode", {"parallel.tp": "3"}),
    ("PP_GT_LAYERS", "prefill", {"parallel.pp": "99"}),
    ("PP_PARTITION_TEXT", "prefill", {"parallel.partition": "all"}),
    ("PP_PARTITION_COUNT", "prefill", {"parallel.pp": "2", "parallel.partition": "8"}),
    ("PP_PARTITION_EMPTY", "prefill", {"parallel.pp": "2", "parallel.partition": "8,0"}),
    ("PP_PARTITION_SUM", "prefill", {"parallel.pp": "2", "parallel.partition": "4,5"}),
    ("MODEL_LEN", "decode", {"model.max_model_len": "1000000"}),
    ("POOL_BELOW_MODEL_LEN", "decode", {"model.max_model_len": "161", "cache.pages": "10"}),
    ("MEMORY", "decode", {"cache.memory_bytes": "1KiB"}),
]
ROUTER_CASES = [
    ("ROUTER_MODEL_FOLDER", {"model.path": "/nowhere"}),
    ("ROUTER_SAME_PORT", {"http.admin_port": "8000"}),
    ("KEY_FILES", {"http.api_key_file": "/nowhere"}),
    ("ADMIN_OPEN", {"http.admin_host": "0.0.0.0"}),
    ("METRICS_AUTH", {"http.metrics_auth": "true"}),
    ("FLEET_ADDRESSES", {"fleet.prefills": "here:*"}),
    ("FLEET_ADDRESSES", {"fleet.prefills": "here:65536"}),
    ("FLEET_ADDRESSES", {"fleet.decodes": "here:0"}),
    ("FLEET_TWICE", {"fleet.prefills": "a:1", "fleet.decodes": "a:1"}),
    ("FLEET_TLS_PAIR", {"fleet.tls_key": __file__}),
    ("FLEET_TLS_CA", {"fleet.tls_cert": __file__, "fleet.tls_key": __file__}),
    ("FLEET_TLS_FILES", {"fleet.tls_ca": "/nowhere"}),
]
# No key of this version violates these; tests/golden/prefix/test_config_refusals.py does, with facts.
WITHOUT_A_KEY = {"PP_TBO", "PP_PAGED_CHECKPOINT", "PP_SPEC_PAIR"}
# Settings that break a second rule by nature.
COMPANIONS = {
    "SHARED_ON_GPU": {"DEVICE"},
    "FLASHMLA_PAGES": {"GPU_ATTENTION"},
    "PP_CUDA_GRAPH": {"GRAPHS_ON_CPU", "PP_REMOTE_KV"},
    "GATE_PIPELINE": {"PP_REMOTE_KV"},
    "CONFIDENCE_HELIX": {"CONFIDENCE_UNCALIBRATED"},
    "CONFIDENCE_WITHOUT_DRAFTS": {"CONFIDENCE_UNCALIBRATED"},
    "PP_CONFIDENCE": {"CONFIDENCE_UNCALIBRATED", "PP_REMOTE_KV"},
    "HELIX_PIPELINE": {"PP_REMOTE_KV"},
    "FLEET_TLS_CA": {"FLEET_TLS_FILES"},
}


def check(code: str, problems) -> None:
    found = {problem.code: problem for problem in problems}
    assert found.keys() == {code} | COMPANIONS.get(code, set())
    assert found[code].values
    assert found[code].why
    assert found[code].remedy


@pytest.mark.parametrize(("code", "role", "flags"), ENGINE_CASES, ids=lambda v: str(v)[:24])
def test_an_engine_refuses(code, role, flags):
    check(code, load_engine(role, CommandLine(flags), {"CUDA_VISIBLE_DEVICES": ""}).problems)


@pytest.mark.parametrize(("code", "flags"), ROUTER_CASES, ids=lambda v: str(v)[:24])
def test_the_router_refuses(code, flags):
    check(code, load_router(CommandLine(flags), {}).problems)


def test_a_model_of_another_family_is_refused_with_the_field(tmp_path):
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    del config["text_config"]["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    problems = load_engine("prefill", CommandLine({"model.path": str(tmp_path)}), {}).problems
    check("MODEL_CONFIG", problems)
    assert "hidden_size" in problems[0].values


@pytest.mark.parametrize(
    ("key", "size", "name"),
    [
        ("num_experts", 12, "12 experts"),
        ("intermediate_size", 1028, "1028 columns of the dense layers"),
        ("vocab_size", 4100, "4100 vocabulary rows"),
    ],
)
def test_every_axis_that_ranks_share_must_divide(tmp_path, key, size, name):
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    config["text_config"][key] = size
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = {"model.path": str(tmp_path), "parallel.cp": "8"}
    problems = load_engine("decode", CommandLine(flags), {}).problems
    check("HEADS", problems)
    assert problems[0].values == f"tp * cp = 8 does not divide {name}"


def calibration(path: Path, **changes: object) -> dict[str, str]:
    """A file for the shipped drafter, and the flags that use it."""
    digest = model_digest(EMBEDDED_MODEL / "draft-mla")
    drafting = {"tokens": [1, 8], "steps_per_s": [9, 5]}
    plain = {"plain_rows": [1, 2], "plain_steps_per_s": [9, 8]}
    good = {"drafter": digest, "temperatures": [1.5] * 7} | drafting | plain
    path.write_text(json.dumps(good | changes))
    return DRAFTING | {"spec.draft_schedule": "confidence", "spec.calibration": str(path)}


def test_confidence_with_a_calibration_of_this_drafter_is_accepted(tmp_path):
    flags = calibration(tmp_path / "c.json")
    assert load_engine("decode", CommandLine(flags), {}).problems == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"drafter": "0" * 64}, "is of drafter 000000000000"),
        ({"drafter": ""}, "drafter: expected the digest"),
        ({"temperatures": [1.0] * 6}, "temperatures of 6 drafts, spec.draft_tokens=7"),
        ({"temperatures": [1.0] * 6 + [0]}, "temperatures: expected a list of positive numbers"),
        ({"tokens": [8, 1]}, "tokens: expected ascending whole numbers"),
        ({"tokens": [1, 8.5]}, "tokens: expected ascending whole numbers"),
        ({"steps_per_s": [5]}, "one rate for each of the 2 sizes"),
        ({"steps_per_s": ["5", True]}, "steps_per_s: expected a list of positive numbers"),
        ({"plain_rows": [1]}, "plain_steps_per_s: expected one rate for each of the 1 sizes"),
        ({"plain_steps_per_s": []}, "plain_steps_per_s: expected a list of positive numbers"),
    ],
)
def test_a_calibration_that_does_not_fit_is_refused_by_field(tmp_path, changes, says):
    flags = calibration(tmp_path / "c.json", **changes)
    problems = load_engine("decode", CommandLine(flags), {}).problems
    check("CALIBRATION", problems)
    assert says in problems[0].values


def test_a_drafter_without_a_confidence_head_is_refused(tmp_path):
    shutil.copytree(EMBEDDED_MODEL / "draft-mla", tmp_path / "draft")
    config = json.loads((tmp_path / "draft/config.json").read_text())
    config["enable_confidence_head"] = False
    (tmp_path / "draft/config.json").write_text(json.dumps(config))
    digest = model_digest(tmp_path / "draft")
    flags = calibration(tmp_path / "c.json", drafter=digest)
    flags["spec.drafter"] = str(tmp_path / "draft")
    check("CONFIDENCE_HEAD", load_engine("decode", CommandLine(flags), {}).problems)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("slot_convention", "mask_predicts", "slot_convention"),
        ("causal_block", True, "causal_block"),
        ("markov_head_type", "lstm", "markov_head_type"),
        ("markov_rank", 0, "markov_rank"),
        ("mask_token_id", 4096, "mask_token_id"),
        ("target_layer_ids", [1, 1], "target_layer_ids"),
        ("target_layer_ids", [1, 12], "target_layer_ids"),
        ("vocab_size", 8192, "vocab_size"),
        ("target_hidden_size", 512, "target_hidden_size"),
        ("speculators_model_type", "dspark", "speculators_model_type"),
        ("block_size", 6, "blocks of 6"),
        ("model_type", "eagle3", "model_type"),
    ],
)
def test_a_drafter_that_would_be_misread_is_refused_by_field(tmp_path, field, value, says):
    config = json.loads((EMBEDDED_MODEL / "draft-mla/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    flags = DRAFTING | {"spec.drafter": str(tmp_path)}
    problems = load_engine("decode", CommandLine(flags), {}).problems
    check("DRAFTER", problems)
    assert says in problems[0].values


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 8), (2, 2), (4, 2), (8, 1)])
def test_any_mesh_that_divides_every_axis_is_accepted_by_decode(tp, cp):
    flags = {"parallel.tp": str(tp), "parallel.cp": str(cp)}
    assert load_engine("decode", CommandLine(flags), {}).problems == ()


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2])
def test_prefill_takes_any_stages_and_ranks_that_the_model_divides_into(pp, tp):
    flags = {"parallel.pp": str(pp), "parallel.tp": str(tp), "spec.drafter": "draft-mla"}
    assert load_engine("prefill", CommandLine(flags), {}).problems == ()


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (2, 2), (4, 1)])
def test_decode_takes_stages_where_their_caches_may_come_from_elsewhere(pp, tp):
    flags = DRAFTING | {
        "parallel.pp": str(pp),
        "parallel.tp": str(tp),
        "parallel.pp_remote_kv": "true",
    }
    assert load_engine("decode", CommandLine(flags), {}).problems == ()


def test_layers_per_stage_may_be_given():
    flags = {"parallel.pp": "3", "parallel.partition": "1, 9,3"}
    config = load_engine("prefill", CommandLine(flags), {}).require()
    assert [len(layers) for layers in mesh_of(config).stage_layers(13)] == [1, 9, 3]


def test_every_rule_has_a_case():
    tested = {code for code, *_ in (*ENGINE_CASES, *ROUTER_CASES)}
    tested |= {"MODEL_CONFIG", "CONFIDENCE_HEAD"}
    rules = (
        *refusals.IDLE_RULES,
        *refusals.ENGINE_RULES,
        *refusals.PIPELINE_RULES,
        *refusals.FIT_RULES,
        *refusals.ROUTER_RULES,
    )
    assert tested | WITHOUT_A_KEY == {rule.code for rule in rules}
    assert len(rules) == len(tested) + len(WITHOUT_A_KEY)


@pytest.mark.parametrize("drain_s", ["3s", "20s"])
def test_what_an_instance_alone_reads_of_the_transfer_section_it_accepts(drain_s):
    """Also what no lease would allow: nothing is leased there."""
    flags = ALONE | {"transfer.drain_s": drain_s}
    assert load_engine("decode", CommandLine(flags), {}).problems == ()


def test_a_default_that_is_written_down_is_never_refused():
    flags = ALONE | {
        "cache.checkpoints": "0",
        "cache.checkpoint_interval": "8192",
        "cache.state_slots": "99",
        "parallel.pp_remote_kv": "false",
        "transfer.lease_s": "30s",
        "transfer.port_range": "",
    }
    assert load_engine("decode", CommandLine(flags), {}).problems == ()
    flags = {"cache.prefix": "on", "cache.checkpoints": "0", "cache.state_slots": "99"}
    assert load_engine("prefill", CommandLine(flags), {}).problems == ()


def test_values_just_inside_the_rules_are_accepted():
    flags = {
        "cache.state_slots": "2",
        "cache.page_tokens": "128",
        "transfer.lease_s": "25.01s",
        "transfer.heartbeat_s": "7.5s",
        "transfer.port_range": "41000-41050",
        "model.max_model_len": "1280",
        "cache.pages": "10",
        "serve.ops_port": "50052",
        "serve.ops_host": "127.0.0.2",
        "serve.prefills": "*:50051,[::1]:*,prefill-0.prefill:50051",
    }
    assert load_engine("decode", CommandLine(flags), {}).problems == ()


def test_docs_refusals_is_current():
    assert (DOCS / "refusals.md").read_text() == refusals.document()
