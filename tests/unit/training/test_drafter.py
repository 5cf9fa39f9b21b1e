"""Both drafter flavours, the training loss and its gradients against the published implementation; rollout counting."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from training.drafter import (
    Blocks,
    DraftDims,
    Drafter,
    block_loss,
    confidence_logits,
    initial,
    markov_bias,
)
from training.rollouts import Acceptance, pooled
from training.train_drafter import draft_config

pytestmark = pytest.mark.dspark

GOLDEN = Path(__file__).parents[2] / "golden/dspark"
SHARED = ("embed_tokens.weight", "lm_head.weight")


def dims_of(config: dict[str, Any]) -> DraftDims:
    common = {
        "flavour": config["flavour"],
        "hidden": config["hidden_size"],
        "intermediate": config["intermediate_size"],
        "n_layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "eps": config["rms_norm_eps"],
        "theta": config["rope_parameters"]["rope_theta"],
        "vocab": config["vocab_size"],
        "target_hidden": config["hidden_size"],
        "taps": tuple(config["target_layer_ids"]),
        "markov_rank": config["markov_rank"],
        "block": config["block_size"],
        "mask_id": config["mask_token_id"],
    }
    if config["flavour"] == "gqa":
        return DraftDims(
            **common, kv_heads=config["num_key_value_heads"], head_dim=config["head_dim"]
        )
    return DraftDims(
        **common,
        q_lora=config["q_lora_rank"],
        kv_lora=config["kv_lora_rank"],
        nope=config["qk_nope_head_dim"],
        rope=config["qk_rope_head_dim"],
        v_dim=config["v_head_dim"],
    )


def open_golden(name: str) -> tuple[DraftDims, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    dims = dims_of(json.loads((GOLDEN / f"{name}.config.json").read_text()))
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    weights = {
        k.removeprefix("weights."): v for k, v in tensors.items() if k.startswith("weights.")
    }
    return dims, tensors, weights


@pytest.mark.parametrize("name", ["drafter_mla", "drafter_gqa"])
def test_five_rounds_of_drafts_equal_the_published_implementation(name: str) -> None:
    dims, t, p = open_golden(name)
    assert {k: tuple(v.shape) for k, v in p.items() if k not in SHARED} == dims.shapes()
    yarn = name == "drafter_mla"
    drafter = Drafter(
        dims,
        t["rope.inv_freq"] if yarn else None,
        float(t["rope.softmax_scale"]) if yarn else None,
    )
    context: list[torch.Tensor] = []
    for r in range(5):
        context.append(t[f"round{r}.new_context_taps"])
        taps = torch.cat(context)[None]
        start = int(t[f"round{r}.start"])
        ids = torch.full((dims.block,), dims.mask_id)
        ids[0] = t[f"round{r}.anchor"]
        position = torch.arange(taps.shape[1])[None]
        blocks = Blocks(
            taps, position, torch.tensor([[start]]), p["embed_tokens.weight"][ids][None]
        )
        hidden = drafter.hidden(blocks, p)[0, 0]
        assert (hidden - t[f"round{r}.block_hidden"]).abs().max() < 1e-4
        previous, drafts = ids[0], []
        for i, base in enumerate(hidden @ p["lm_head.weight"].T):
            logits = base + markov_bias(previous, p)
            assert (logits - t[f"round{r}.markov_logits_greedy"][i]).abs().max() < 1e-4
            confidence = confidence_logits(hidden[i], previous, p)
            assert abs(confidence - t[f"round{r}.confidence_logits_greedy"][i]) < 1e-4
            previous = logits.argmax()
            drafts.append(int(previous))
        assert drafts == t[f"round{r}.draft_tokens_greedy"].tolist()


def test_training_loss_and_gradients_equal_the_published_implementation() -> None:
    dims, t, weights = open_golden("train_loss")
    p = {name: value.clone().requires_grad_(name not in SHARED) for name, value in weights.items()}
    ids, anchors = t["in.input_ids"], t["anchors"]
    n_rows = ids.shape[1]
    position = anchors[..., None] + torch.arange(dims.block)

    def at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return values.gather(1, index.clamp(max=n_rows - 1).flatten(1)).view(index.shape)

    tokens = torch.full(position.shape, dims.mask_id)
    tokens[..., 0] = ids.gather(1, anchors)
    inputs = p["embed_tokens.weight"][tokens].flatten(1, 2)
    rows = torch.arange(n_rows).expand(len(ids), -1)
    hidden = Drafter(dims).hidden(Blocks(t["in.target_taps"], rows, anchors, inputs), p)
    inside = (position + 1 < n_rows) & (at(t["in.loss_mask"], position + 1) > 0)
    mask = inside.float().cumprod(-1) * t["anchor_keep"][..., None]
    assert torch.equal(mask, t["out.eval_mask"].float())
    previous = at(ids, position)
    head = p["lm_head.weight"]
    index = position.clamp(max=n_rows - 1).flatten(1)[..., None].expand(-1, -1, dims.hidden)
    target = t["in.target_last_hidden"].gather(1, index).view(*position.shape, -1) @ head.T
    loss = block_loss(
        hidden @ head.T + markov_bias(previous, p),
        confidence_logits(hidden, previous, p),
        target,
        at(ids, position + 1),
        mask,
        4.0,
    )
    loss.total.backward()
    assert float(loss.total.detach()) == pytest.approx(float(t["loss.total"]), abs=1e-5)
    assert float(loss.tau) == pytest.approx(float(t["stat.tau_probabilistic"]), abs=1e-5)
    for name, expected in t.items():
        if name.startswith("grad."):
            grad = p[name.removeprefix("grad.")].grad
            assert grad is not None
            assert (grad - expected).abs().max() < 1e-5, name


@pytest.mark.parametrize("flavour", ["mla", "gqa"])
def test_rows_outside_the_window_and_after_the_anchor_change_nothing(flavour: Any) -> None:
    dims = DraftDims(flavour, hidden=32, intermediate=48, target_hidden=32, vocab=64, mask_id=60)
    p = initial(dims, 1)
    rng = torch.Generator().manual_seed(8)
    taps = torch.randn(1, 40, len(dims.taps) * 32, generator=rng)
    inputs = torch.randn(1, 2 * dims.block, 32, generator=rng)
    anchors = torch.tensor([[17, 25]])
    rows = torch.arange(40)[None]
    drafter = Drafter(dims)
    first = drafter.hidden(Blocks(taps, rows, anchors, inputs, window=6), p)
    changed = taps.clone()
    changed[:, :11] += 1.0  # older than 17 - 6
    changed[:, 25:] -= 1.0  # not before the last anchor
    second = drafter.hidden(Blocks(changed, rows, anchors, inputs, window=6), p)
    assert torch.equal(first, second)
    changed[:, 24] += 1.0
    assert not torch.equal(
        first, drafter.hidden(Blocks(changed, rows, anchors, inputs, window=6), p)
    )


def test_pooling_weights_suites_by_their_steps() -> None:
    a = Acceptance(3.0, (0.5,), 10, 30)
    b = Acceptance(6.0, (1.0,), 30, 180)
    assert pooled([a, b]) == Acceptance(5.25, (0.875,), 40, 210)


@pytest.mark.parametrize("flavour", ["mla", "gqa"])
def test_drafter_configurations_record_stream_slots_and_window(flavour: Any) -> None:
    config = draft_config(DraftDims(flavour))
    choices = config.get("dflash_config", config)
    assert choices["tap_stream"] == "prefix"
    assert choices["slot_convention"] == "anchor_predicts"
    assert choices["draft_window"] is None
    assert choices["target_layer_ids"] == [1, 3, 7, 9, 11]
