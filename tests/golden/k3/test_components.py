"""Single operations against third-party reference outputs. Tolerances: 2e-5, KDA 1e-5, MXFP4 exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from k3_kernels.reference import attnres, conv, kda, mxfp4, norm
from k3_kernels.reference.moe import Routing, route
from safetensors.torch import load_file
from torch import Tensor

from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.model.batch import ChunkBatch
from k3.model.mla import Mla
from k3.model.moe import Moe
from k3.model.spec import QK_NORM_EPS, K3Spec
from k3.model.weights import MemorySource, Weights
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import SOLO
from tests.compare import assert_close
from tests.model_runner import CPU, OPS
from tests.mxfp4 import pack

HERE = Path(__file__).parent
G = load_file(HERE / "components.safetensors")
ATOL, KDA_ATOL = 2e-5, 1e-5


def _of(prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(f"{prefix}."): v for k, v in G.items() if k.startswith(f"{prefix}.")}


def _spec(**changes: Any) -> K3Spec:
    """k3-nano with other text fields."""
    config = json.loads((HERE / "config.json").read_text())
    config["text_config"].update(changes)
    return K3Spec.from_config(config)


def _kda_inputs(c: dict[str, Tensor], bound: float | None) -> tuple[Tensor, ...]:
    """Normalised q, k, and v, log decay, beta of all sequences, [B, T, H, ...]."""
    q = kda.l2_normalize(c["q"], QK_NORM_EPS) * c["q"].shape[-1] ** -0.5
    k = kda.l2_normalize(c["k"], QK_NORM_EPS)
    raw = c["g_raw"] + c["dt_bias"].view(c["g_raw"].shape[-2:])
    return q, k, c["v"], kda.gate(raw, c["A_log"].exp(), bound), torch.sigmoid(c["beta_raw"])


KDA_CASES = [("kda_lb", -5.0), ("kda_nolb", None), ("kda_lb64", -5.0)]


@pytest.mark.parametrize("name, bound", KDA_CASES)
def test_kda_gate_matches(name: str, bound: float | None) -> None:
    c = _of(name)
    assert_close(_kda_inputs(c, bound)[3], c["gate"], KDA_ATOL, "gate")


@pytest.mark.parametrize("form", [kda.chunk, kda.recurrent], ids=["chunk", "recurrent"])
@pytest.mark.parametrize(
    "name, bound, start",
    [(name, bound, "h0") for name, bound in KDA_CASES]
    + [(name, bound, "zero") for name, bound in KDA_CASES[:2]],
)
def test_kda_sequence_matches_in_both_forms(name: str, bound, start: str, form) -> None:
    c = _of(name)
    suffix = "" if start == "h0" else "_zero_init"
    inputs = _kda_inputs(c, bound)
    for b in range(c["q"].shape[0]):
        state = c["h0"][b] if start == "h0" else torch.zeros_like(c["h0"][b])
        o, final = form(*(x[b] for x in inputs), state)
        assert_close(o, c[f"o{suffix}"][b], KDA_ATOL, "o")
        assert_close(final, c[f"state{suffix}"][b], KDA_ATOL, "state")


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("name, bound", KDA_CASES[:2])
def test_kda_verify_leaves_the_state_after_every_token(name: str, bound, group: int) -> None:
    c = _of(name)
    inputs = [x[:, :group] for x in _kda_inputs(c, bound)]
    n = c["q"].shape[0]
    states = torch.full((n * 8, *c["h0"].shape[1:]), float("nan"))
    states[0::8] = c["h0"]
    slots, column = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    kda.verify(*inputs, states, slots, column, 8)
    got = states.view(n, 8, *c["h0"].shape[1:])[:, :group]
    assert_close(got, c["state_after"][:, 1 : group + 1], KDA_ATOL, "states")


def test_convolution_matches_over_a_chunk_and_step_by_step() -> None:
    c = _of("conv")
    weight = c["weight"].view(24, 1, 1, 4)  # one head of one channel each: [H, S, D, w]
    for b in range(2):
        y, window = conv.chunk(c["x"][b].view(9, 24, 1, 1), weight, torch.zeros(24, 1, 1, 3))
        assert_close(y.flatten(1), c["y"][b], ATOL, "y")
        assert_close(window.flatten(0, 2), c["state"][b, :, 1:], ATOL, "window")
    windows, tails = (
        c["state"][..., 1:].reshape(2, 24, 1, 1, 3).clone(),
        torch.empty(2, 24, 1, 0, 1),
    )
    slots, column = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    for t in range(3):
        u = c["x_step"][:, t].view(2, 1, 24, 1, 1)
        y = conv.verify(u, weight, windows, tails, slots, column)
        assert_close(y.flatten(1), c["y_step"][:, t], ATOL, f"y_step {t}")
    assert_close(windows.flatten(1, 3), c["state_step"][..., 1:], ATOL, "window")


def test_gated_output_norm_matches() -> None:
    c = _of("o_norm")
    assert_close(norm.gated_rms_norm(c["x"], c["g"], c["weight"], 1e-5), c["y"], ATOL, "y")


def test_rms_norm_matches_where_eps_matters() -> None:
    c = _of("rms")
    assert_close(norm.rms_norm(c["x"], c["weight"], 1e-5), c["y"], ATOL, "y")


@pytest.mark.parametrize(
    "name, beta, linear_beta", [("y_4_25", 4.0, 25.0), ("y_1_2", 1.0, 2.0), ("y_4_none", 4.0, None)]
)
def test_situ_matches(name: str, beta: float, linear_beta: float | None) -> None:
    c = _of("situ")
    gate, up = c["x"].chunk(2, -1)
    assert_close(norm.situ(gate, up, beta, linear_beta), c[name], ATOL, name)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_residual_mixture_matches(n: int) -> None:
    c, w = _of(f"attnres{n}"), _of("attnres")
    candidates = torch.cat((c["prefix_sum"].unsqueeze(1), c["blocks"]), 1)
    got = attnres.mix(candidates, w["norm_weight"] * w["proj_weight"][0], 1e-5)
    assert_close(got, c["y"], ATOL, f"{n} blocks")


@pytest.mark.parametrize(
    "name, rule",
    [
        ("moe", Routing(4, "sigmoid", True, 1.7)),
        ("moe_norenorm", Routing(4, "sigmoid", False, 1.7)),
        ("moe_group", Routing(4, "sigmoid", True, 1.7, 4, 2)),
    ],
)
def test_router_chooses_the_same_experts_and_weights(name: str, rule: Routing) -> None:
    c = _of(name)
    ids, weight = route(c["x"][0], c["gate.weight"], c["gate.e_score_correction_bias"], rule)
    order = ids.argsort(-1)
    expected = c["topk_ids"].argsort(-1)
    assert torch.equal(ids.gather(-1, order), c["topk_ids"].gather(-1, expected))
    assert_close(weight.gather(-1, order), c["topk_weights"].gather(-1, expected), ATOL, "weights")


def test_latent_moe_layer_matches() -> None:
    c = _of("moe")
    spec = _spec(routed_scaling_factor=1.7)
    prefix = "model.layers.1.block_sparse_moe."
    tensors = {prefix + name: t for name, t in c.items() if name.endswith((".weight", "_bias"))}
    for e in range(16):
        gate, up = c["experts.gate_and_up_projs"][e].t().chunk(2)
        tensors[f"{prefix}experts.{e}.w1.weight"] = gate
        tensors[f"{prefix}experts.{e}.w3.weight"] = up
        tensors[f"{prefix}experts.{e}.w2.weight"] = c["experts.down_projs"][e].t()
    weights = Weights(MemorySource(tensors), tensors, torch.float32, CPU)
    moe = Moe(spec, SOLO, solo_groups().shard, OPS, weights, 1, "dequant")
    weights.finish()
    assert_close(torch.stack(moe(c["x"][0])).sum(0), c["y"][0], ATOL, "y")


def test_gated_mla_layer_and_its_latent_rows_match() -> None:
    c = _of("mla")
    spec = _spec(
        q_lora_rank=24,
        kv_lora_rank=32,
        v_head_dim=12,
        num_hidden_layers=1,
        linear_attn_config=_linear_config(kda_layers=[], full_attn_layers=[1]),
    )
    prefix = "model.layers.0.self_attn."
    tensors = {prefix + name: t for name, t in c.items() if name.endswith(".weight")}
    weights = Weights(MemorySource(tensors), tensors, torch.float32, CPU)
    mla = Mla(spec, SOLO, solo_groups(), OPS, weights, prefix)
    weights.finish()
    layout = build_layout(spec, SOLO.mesh, 0, page_tokens=4, dtype="float32")
    storage = Storage(layout, 6, 1, CPU, fill_nan=True)
    latents = storage.caches().latents[0]
    pages = torch.tensor([[5, 0, 3, 1, 4]], dtype=torch.int32)
    position = torch.arange(19)
    slot = pages[0, position // 4].long() * 4 + position % 4
    batch = ChunkBatch(position, (0, 19), (0,), pages, slot, (-1,), (0,))
    assert_close(mla.chunk(c["x"][0], latents, batch), c["y"][0], ATOL, "y")
    rows = latents[pages[0].long()].flatten(0, 1)
    assert_close(rows[:19], c["latent"][0], ATOL, "latent")
    assert bool(rows[19:].isnan().all())


def _linear_config(**changes: Any) -> dict[str, Any]:
    config = json.loads((HERE / "config.json").read_text())["text_config"]["linear_attn_config"]
    return config | changes


def test_mxfp4_unpacks_exactly() -> None:
    c = _of("mxfp4")
    assert torch.equal(mxfp4.unpack(c["packed"], c["scale"], torch.float32), c["w"])


def test_mxfp4_example_of_the_packed_model_unpacks_exactly() -> None:
    expected = load_file(HERE / "cases-mxfp4.safetensors")["dequant.example"]
    tensors = load_file(HERE / "experts-mxfp4.safetensors")
    candidates = [
        mxfp4.unpack(packed, tensors[name.replace("_packed", "_scale")], torch.float32)
        for name, packed in tensors.items()
        if name.endswith("weight_packed")
    ]
    assert any(w.shape == expected.shape and torch.equal(w, expected) for w in candidates)


def test_packing_what_was_unpacked_gives_the_same_values() -> None:
    w = _of("mxfp4")["w"]
    packed, scale = pack(w)
    assert torch.equal(mxfp4.unpack(packed, scale, torch.float32), w)
