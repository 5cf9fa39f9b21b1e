"""Fields of the caches: shapes, byte counts at real K3 size, fingerprints."""

import json
from pathlib import Path

import pytest

from k3.cache.layout import build_layout, fingerprint, first_difference, layout_document
from k3.errors import ConfigError
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh

ROOT = Path(__file__).resolve().parents[3]
K3 = K3Spec.from_config(
    json.loads((ROOT / "docs/examples/kimi-k3-config.json").read_text()), "kimi-k3-config.json"
)
MINI = K3Spec.from_folder(ROOT / "k3/assets/tiny")


def layout(spec, mesh=None, stage=0, **kwargs):
    options = {"page_tokens": 64, "dtype": "bfloat16"} | kwargs
    return build_layout(spec, mesh or Mesh(), stage, **options)


def test_real_k3_page_and_slot_cost_what_the_model_card_says():
    whole = layout(K3)
    assert whole.page_bytes == 64 * 27_648
    assert whole.slot_bytes == 449_372_160


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_state_is_split_over_all_ranks_and_pages_are_not(ranks):
    part = layout(K3, Mesh(cp=ranks))
    assert part.slot_bytes * ranks == layout(K3).slot_bytes
    assert part.page_bytes == layout(K3).page_bytes


@pytest.mark.prefill
def test_stages_together_hold_every_layer_once():
    mesh = Mesh(pp=4)
    parts = [layout(K3, mesh, stage) for stage in range(4)]
    latent = [i for p in parts for i in (p.field("latent").layers if p.field("latent") else ())]
    kda = [i for p in parts for i in (p.field("kda").layers if p.field("kda") else ())]
    assert sorted(latent + kda) == list(range(93))
    assert len(latent) == 24
    assert sum(p.page_bytes for p in parts) == layout(K3).page_bytes


def test_a_stage_without_a_kind_of_layer_has_no_such_field():
    parts = [layout(MINI, Mesh(pp=13), stage) for stage in range(13)]
    assert [p.field("latent") is not None for p in parts] == [MINI.is_mla(i) for i in range(13)]
    assert parts[0].page_bytes == 0
    assert parts[0].pages_for(1, 1) > 10**6, "such a stage never limits the number of pages"


@pytest.mark.dspark
def test_snapshots_cost_one_recurrent_state_per_column_but_one_window():
    plain, snapshots = layout(MINI), layout(MINI, columns=8)
    kda = plain.field("kda").unit_bytes
    tails = 9 * 8 * 3 * 32 * 7 * 2  # layers, heads, q k v, dim, further inputs, bfloat16
    assert snapshots.slot_bytes == plain.slot_bytes + 7 * kda + tails


@pytest.mark.parametrize("ranks", [1, 16])
@pytest.mark.dspark
def test_replay_of_real_k3_costs_records_instead_of_states(ranks):
    mesh = Mesh(cp=ranks)
    plain = layout(K3, mesh).slot_bytes
    tails = 69 * 96 * 3 * 128 * 7 * 2
    records = 69 * 96 * 3 * 128 * 8 * 4
    replay, snapshots = layout(K3, mesh, records=8), layout(K3, mesh, columns=8)
    assert (replay.slot_bytes - plain) * ranks == records + tails
    assert records == 81_395_712
    assert (snapshots.slot_bytes - plain) * ranks == 7 * 69 * 96 * 128 * 128 * 4 + tails
    assert replay.field("kda").columns == 1


@pytest.mark.dspark
def test_a_slot_keeps_states_or_records_but_not_both():
    with pytest.raises(ConfigError, match="columns=2 with records=2"):
        layout(MINI, columns=2, records=2)


def test_float64_models_keep_float64_state():
    assert layout(MINI, dtype="float64").field("kda").dtype == "float64"
    assert layout(MINI, dtype="bfloat16").field("kda").dtype == "float32"


def test_pages_for_a_budget_leave_room_for_the_slots():
    mini = layout(MINI, page_tokens=16, dtype="float32")
    budget = 10 * mini.slot_bytes + 3 * mini.page_bytes + mini.page_bytes - 1
    assert mini.pages_for(budget, 10) == 3
    assert mini.pages_for(mini.slot_bytes * 9, 10) < 0


def test_first_difference_names_the_field_and_both_values():
    common = {"dtype": "float32", "model_digest": "d"}
    ours = layout_document(MINI, page_tokens=16, **common)
    theirs = layout_document(MINI, page_tokens=32, **common)
    assert first_difference(ours, ours) is None
    assert first_difference(ours, theirs) == "page_tokens: 16 != 32"
    assert fingerprint(ours) != fingerprint(theirs)
