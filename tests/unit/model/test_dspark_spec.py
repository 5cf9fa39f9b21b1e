"""Drafter configurations: both dialects become one spec, and what would corrupt drafts silently is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3.config.resolve import EMBEDDED_MODEL
from k3.errors import ModelError
from k3.model.dspark import draft_weights, open_context
from k3.model.dspark_spec import DraftSpec, GqaDraft, MlaDraft, ring_places
from k3.model.spec import K3Spec
from k3.model.weights import MemorySource
from k3.parallel.mesh import WHOLE
from tests.drafters import random_drafter
from tests.model_runner import CPU, OPS

pytestmark = pytest.mark.dspark

NANO = Path(__file__).parents[2] / "golden" / "k3"
ROPE_MLA = {
    "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32768, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
ROPE_GQA = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536}
# The published drafters of Kimi-K3, as their configurations stand.
PUBLISHED_MLA: dict[str, Any] = {
    "architectures": ["K3DSparkModel"], "model_type": "k3_dspark", "hidden_size": 7168, "intermediate_size": 14336,
    "num_hidden_layers": 5, "num_attention_heads": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "vocab_size": 163840, "rope_theta": 50000.0, "rope_scaling": ROPE_MLA, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": False,
    "mla_use_output_gate": False, "target_layer_ids": [2, 23, 47, 71, 89], "mask_token_id": 163837,
    "markov_rank": 256,
}  # fmt: skip
PUBLISHED_GQA: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"], "model_type": "qwen3", "hidden_size": 7168, "intermediate_size": 14336,
    "num_hidden_layers": 5, "num_attention_heads": 64, "num_key_value_heads": 16, "head_dim": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "vocab_size": 163840, "rope_theta": 10000.0, "rope_scaling": ROPE_GQA, "block_size": 7,
    "attention_bias": False,
    "dflash_config": {"target_layer_ids": [7, 23, 51, 67, 83], "mask_token_id": 163824, "markov_rank": 256},
}  # fmt: skip


def changed(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return json.loads(json.dumps(config)) | fields


def test_the_published_mla_drafter_is_read_with_its_own_numbers():
    spec = DraftSpec.from_config(PUBLISHED_MLA)
    assert spec.attention == MlaDraft(1536, 512, 128, 64, 128)
    assert (spec.tap_stream, spec.block_size, spec.mask_token_id) == ("prefix", None, 163837)
    assert spec.rope.amplitude == 1.0
    assert spec.scale == pytest.approx(192**-0.5 * 1.3466**2, rel=1e-4)
    assert 2 * 5 * 576 == 2 * spec.place_shape(1, 1)[0] * spec.place_shape(1, 1)[2] == 5760
    total = sum(torch.Size(shape[0]).numel() for shape in spec.tensors(confidence=True).values())
    assert total == pytest.approx(2.39e9, rel=0.01)


def test_the_published_gqa_drafter_is_read_with_its_own_numbers():
    spec = DraftSpec.from_config(PUBLISHED_GQA)
    assert spec.attention == GqaDraft(16, 64)
    assert (spec.tap_stream, spec.block_size, spec.mask_token_id) == ("mixture", 7, 163824)
    assert spec.rope.amplitude == pytest.approx(1.2773, abs=1e-4)
    tensors = spec.tensors(confidence=True)
    assert len(tensors) == 62
    assert sum(torch.Size(shape[0]).numel() for shape in tensors.values()) == 2_249_289_601


def test_a_recorded_tap_stream_wins_over_the_lineage():
    assert (
        DraftSpec.from_config(changed(PUBLISHED_MLA, tap_stream="mixture")).tap_stream == "mixture"
    )
    assert (
        DraftSpec.from_config(changed(PUBLISHED_MLA, aux_hidden_stream="mixture")).tap_stream
        == "mixture"
    )


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"speculators_model_type": "dspark"}, "speculators_model_type"),
        ({"slot_convention": "mask_predicts"}, "slot_convention"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [3, 3]}, "target_layer_ids"),
        ({"mask_token_id": 163840}, "mask_token_id"),
        ({"markov_rank": 0}, "markov_rank"),
        ({"markov_head_type": "lstm"}, "markov_head_type"),
        ({"causal_block": True}, "causal_block"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type"),
        ({"model_type": "llama"}, "model_type"),
        ({"tap_stream": "suffix"}, "tap_stream"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_what_would_corrupt_drafts_silently_is_refused_by_name(fields, word):
    with pytest.raises(ModelError, match=word):
        DraftSpec.from_config(changed(PUBLISHED_MLA, **fields))


def test_a_drafter_of_another_model_is_refused():
    spec = DraftSpec.from_config(PUBLISHED_MLA)
    with pytest.raises(ModelError, match="vocab_size"):
        spec.check_target(K3Spec.from_folder(NANO))
    own = DraftSpec.from_folder(EMBEDDED_MODEL / "draft-gqa")
    own.check_target(K3Spec.from_folder(EMBEDDED_MODEL))
    with pytest.raises(ModelError, match="blocks of 7"):
        own.block(8)
    assert own.block(3) == 7


def test_copies_of_the_targets_tables_are_ignored_and_anything_else_unknown_is_an_error():
    spec = DraftSpec.from_folder(EMBEDDED_MODEL / "draft-mla")
    tensors = {name: torch.zeros(shape[0]) for name, shape in spec.tensors(confidence=True).items()}

    def load(extra: dict[str, torch.Tensor]) -> None:
        draft_weights(
            spec,
            MemorySource(tensors | extra),
            context_only=False,
            dtype="float32",
            device=torch.device("cpu"),
        )

    load({"embed_tokens.weight": torch.zeros(1), "lm_head.weight": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"layers\.9\.strange"):
        load({"layers.9.strange": torch.zeros(1)})
    del tensors["context_norm.weight"]
    with pytest.raises(ModelError, match=r"context_norm\.weight"):
        load({})


@pytest.mark.parametrize(("flavour", "column"), [("mla", "context_proj"), ("gqa", "fc")])
def test_taps_are_listed_in_any_order_and_each_keeps_its_columns(tmp_path, flavour, column):
    """Taps come in ascending order, whatever the order of the list and of the projection's columns."""
    listed = random_drafter(tmp_path / "listed", K3Spec.from_folder(NANO), flavour, 3)
    config = json.loads((listed / "config.json").read_text())
    tensors = load_file(listed / "model.safetensors")
    section = config if flavour == "mla" else config["dflash_config"]
    taps = section["target_layer_ids"]
    section["target_layer_ids"] = sorted(taps)
    assert taps != sorted(taps)
    (tmp_path / "sorted").mkdir()
    (tmp_path / "sorted" / "config.json").write_text(json.dumps(config))
    columns = tensors[f"{column}.weight"].chunk(len(taps), 1)
    moved = torch.cat([columns[taps.index(tap)] for tap in sorted(taps)], 1)
    save_file(tensors | {f"{column}.weight": moved}, tmp_path / "sorted" / "model.safetensors")
    hidden = columns[0].shape[1]
    values = torch.randn(5, len(taps), hidden, generator=torch.Generator().manual_seed(1))
    rows = [
        open_context(folder, WHOLE, dtype="float64", device=CPU, ops=OPS.dense)(
            values.double(), torch.arange(5)
        )
        for folder in (listed, tmp_path / "sorted")
    ]
    assert torch.equal(*rows)


def test_rows_of_another_drafter_stream_precision_or_page_are_not_ours():
    spec = DraftSpec.from_config(PUBLISHED_MLA)

    def printed(spec: DraftSpec, digest="d", dtype="bfloat16", page_tokens=16) -> str:
        return spec.fingerprint(digest=digest, dtype=dtype, page_tokens=page_tokens)

    others = (
        printed(spec, digest="e"),
        printed(spec, dtype="float32"),
        printed(spec, page_tokens=32),
        printed(replace(spec, tap_stream="mixture")),
    )
    assert len({printed(spec), *others}) == 5


def test_prefill_loads_only_what_makes_context_rows():
    context = open_context(
        EMBEDDED_MODEL / "draft-gqa",
        WHOLE,
        dtype="float32",
        device=torch.device("cpu"),
        ops=OPS.dense,
    )
    rows = context(torch.zeros(3, 5, 256), torch.arange(3))
    assert rows.shape == (3, 4, 2, 2, 32)


def test_a_ring_holds_the_window_and_one_group():
    assert ring_places(64, 8, 16) == 5
    assert ring_places(64, 1, 16) == 5
    assert ring_places(60, 17, 16) == 6
