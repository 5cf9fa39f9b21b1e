"""Reading config.json: the real model's structure and sizes, and refusals that name the field."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from k3.cache.layout import build_layout
from k3.errors import ModelError
from k3.model.names import model_tensors, parameter_count
from k3.model.spec import K3Spec, LayerKind
from k3.parallel.mesh import Mesh

ROOT = Path(__file__).parents[3]
REAL = json.loads((ROOT / "docs/examples/kimi-k3-config.json").read_text())
NANO = json.loads((ROOT / "tests/golden/k3/config.json").read_text())


@pytest.fixture(scope="module")
def real() -> K3Spec:
    return K3Spec.from_config(REAL)


def cache_bytes(spec: K3Spec, dtype: str, n_layers: int | None = None) -> dict[str, int]:
    """Latent bytes of a token and state bytes of a request, of all layers or of the first `n_layers`."""
    split = (n_layers, spec.num_layers - n_layers) if n_layers else None
    mesh = Mesh(pp=2, partition=split) if split else Mesh()
    layout = build_layout(spec, mesh, 0, page_tokens=1, dtype=dtype)
    return {field.name: field.unit_bytes for field in layout.fields}


def test_real_k3_has_the_published_structure(real: K3Spec) -> None:
    assert real.num_layers == 93
    full = real.layers_of(LayerKind.MLA)
    assert full == (*range(3, 92, 4), 92)
    assert len(real.layers_of(LayerKind.KDA)) == 69
    assert [i for i in range(93) if not real.is_moe(i)] == [0]
    assert [real.bank_depth(i) for i in (0, 1, 12, 13, 47, 48, 93)] == [0, 1, 1, 2, 4, 4, 8]
    assert (real.mla.latent_width, real.mla.query_dim, real.kda.width) == (576, 192, 12288)
    assert real.mxfp4_experts
    assert (real.bos_token_id, real.eos_token_id, real.pad_token_id) == (163584, 163586, 163839)
    assert real.media_token_id == 163605


def test_real_k3_has_the_published_sizes(real: K3Spec) -> None:
    assert abs(parameter_count(real) - 2.7795e12) < 1e8
    assert cache_bytes(real, "bfloat16") == {
        "latent": 27_648,
        "kda": 434_110_464,
        "conv": 15_261_696,
    }
    assert cache_bytes(real, "bfloat16", n_layers=4)["latent"] == 1_152
    assert cache_bytes(real, "bfloat16", n_layers=1)["kda"] == 6_291_456


def test_real_k3_tensor_table_has_the_published_shapes(real: K3Spec) -> None:
    names = model_tensors(real)
    layer = "model.layers.1."
    assert names["lm_head.weight"] == ((163840, 7168),)
    assert names[f"{layer}self_attn.A_log"][0] == (128,)
    assert (12288, 4) in names[f"{layer}self_attn.q_conv1d.weight"]
    experts = f"{layer}block_sparse_moe.experts.895."
    assert names[f"{experts}w1.weight_packed"] == ((3072, 1792),)
    assert names[f"{experts}w2.weight_scale"] == ((3584, 96),)
    assert names["model.layers.92.self_attn.kv_b_proj.weight"] == ((24576, 512),)
    assert "model.layers.0.mlp.gate_proj.weight" in names


def test_nano_has_the_documented_sizes() -> None:
    nano = K3Spec.from_config(NANO)
    assert round(parameter_count(nano) / 1e6, 3) == 0.842
    assert cache_bytes(nano, "float32") == {"latent": 480, "kda": 6 * 4096, "conv": 6 * 2304}


def test_bare_text_config_gives_the_same_model_as_its_wrapper() -> None:
    text = copy.deepcopy(NANO["text_config"])
    assert K3Spec.from_config(text) == K3Spec.from_config(NANO)


def test_k31_is_read_as_the_k3_class() -> None:
    config = {**NANO, "architectures": ["KimiK31ForConditionalGeneration"]}
    assert K3Spec.from_config(config) == K3Spec.from_config(NANO)


NULLABLE = {
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "attn_res_block_size",
    "q_lora_rank",
    "routed_expert_hidden_size",
    "gate_lower_bound",
}
UNREAD = {
    "architectures",
    "model_type",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "initializer_range",
    "use_cache",
    "num_nextn_predict_layers",
    "quantization_config",
    "linear_attn_config",
}


@pytest.mark.parametrize("name", sorted(NANO["text_config"].keys() - NULLABLE - UNREAD))
def test_a_missing_text_field_is_refused_by_name(name: str) -> None:
    config = copy.deepcopy(NANO)
    del config["text_config"][name]
    with pytest.raises(ModelError, match=f"'{name}' is missing"):
        K3Spec.from_config(config)


@pytest.mark.parametrize(
    "name", sorted(NANO["text_config"]["linear_attn_config"].keys() - NULLABLE)
)
def test_a_missing_linear_attention_field_is_refused_by_name(name: str) -> None:
    config = copy.deepcopy(NANO)
    del config["text_config"]["linear_attn_config"][name]
    with pytest.raises(ModelError, match=f"'{name}' is missing"):
        K3Spec.from_config(config)


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"hidden_act": "silu"}, "hidden_act='silu'"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"moe_router_activation_func": "tanh"}, "moe_router_activation_func"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"quantization_config": NVFP4}, "quant_method='modelopt'"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"mla_use_output_gate": None}, "mla_use_output_gate"),
        ({"num_hidden_layers": 10}, "1..10"),
        ({"num_experts_per_token": 17}, "num_experts_per_token=17"),
        ({"num_expert_group": 3}, "num_expert_group=3"),
        ({"dtype": "float8"}, "dtype='float8'"),
        ({"eos_token_id": [2, 3]}, "eos_token_id"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = copy.deepcopy(NANO)
    config["text_config"].update(changes)
    for name in changes:
        config.pop(name, None)
    with pytest.raises(ModelError, match=message.replace("[", r"\[").replace(".", r"\.")):
        K3Spec.from_config(config)


def test_layer_lists_that_overlap_are_refused() -> None:
    config = copy.deepcopy(NANO)
    config["text_config"]["linear_attn_config"]["kda_layers"].append(4)
    with pytest.raises(ModelError, match="disjoint"):
        K3Spec.from_config(config)


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    config = {**NANO, "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ModelError, match="KimiK3ForConditionalGeneration"):
        K3Spec.from_config(config)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_broken_config_file_is_refused_by_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        K3Spec.from_folder(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        K3Spec.from_folder(tmp_path)
