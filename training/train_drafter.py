"""Trains one drafter flavour against the frozen target, from a `Store` on the device. Resumable by checkpoint."""

import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from training import checkpoint
from training.draft_data import Store
from training.drafter import (
    Blocks,
    DraftDims,
    Drafter,
    Loss,
    block_loss,
    confidence_logits,
    initial,
    is_muon,
    markov_bias,
)
from training.evaluate import Model
from training.optimizer import Optimizer
from training.recipe import DrafterRecipe


class DrafterRun:
    """One flavour's run; checkpoints go to `folder`."""

    def __init__(self, model: Model, recipe: DrafterRecipe, dims: DraftDims, folder: Path) -> None:
        self.model, self.recipe, self.dims = model, recipe, dims
        self.file = folder / f"draft-{dims.flavour}.safetensors"
        self.device = model.device
        self.drafter = Drafter(dims)
        values = {n: v.to(self.device) for n, v in initial(dims, recipe.seed).items()}
        self.optimizer = Optimizer(
            values,
            is_muon,
            slow=lambda name: False,
            frozen=lambda name: False,
            leaf_dtype=model.params.dtype,
            lr_muon=recipe.lr_muon,
            lr_adam=recipe.lr_adam,
            decay=0.0,
        )
        self.embedding = model.params.top["embed_tokens.weight"].to(model.params.dtype)
        self.head = model.params.top["lm_head.weight"].to(model.params.dtype)
        self.step = 0
        self.log: list[dict[str, float]] = []

    def run(self, store: Store) -> None:
        """Train all steps, from the last checkpoint if there is one."""
        self._resume()
        recipe = self.recipe
        pools = _pools(store, recipe)
        shares = [
            bucket[3] if len(pool) else 0.0
            for bucket, pool in zip(recipe.buckets, pools, strict=True)
        ]
        began, pending = time.monotonic(), []
        while self.step < recipe.n_steps:
            rng = random.Random(f"{recipe.seed}:{self.step}")
            at = rng.choices(range(len(pools)), shares)[0]
            rows, n_documents, n_anchors, _ = recipe.buckets[at]
            chosen = torch.tensor(rng.choices(pools[at].tolist(), k=n_documents))
            pending.append(self.train_step(store, chosen, rows, n_anchors, self.step))
            self.step += 1
            if self.step % 100 == 0 or self.step == recipe.n_steps:
                self._report(pending, time.monotonic() - began)
                pending = []
        self._checkpoint()

    def train_step(
        self, store: Store, chosen: Tensor, rows: int, n_anchors: int, step: int
    ) -> Tensor:
        """One update on documents `chosen`; returns [total, ce, l1, confidence, tau]."""
        loss = self.loss(store, chosen, rows, n_anchors, step)
        loss.total.backward()
        self.optimizer.step(self._factor(step))
        parts = (loss.total, loss.ce, loss.l1, loss.confidence, loss.tau)
        return torch.stack([part.detach() for part in parts])

    def loss(self, store: Store, chosen: Tensor, rows: int, n_anchors: int, step: int) -> Loss:
        """Loss of random anchors in the answers of `chosen`; context is each document's first `rows` tokens."""
        d, k, device = self.dims, self.dims.block, self.device
        starts = store.starts[chosen].to(device)[:, None]
        lengths = store.lengths[chosen].to(device)[:, None]
        place = torch.arange(rows, device=device)[None]
        inside = place < lengths
        index = torch.where(inside, starts + place, starts)
        answer = store.answer[index] & inside
        follows = torch.cat((answer[:, 1:], torch.zeros_like(answer[:, :1])), 1)
        random_of_step = torch.Generator(device).manual_seed(self.recipe.seed * 1_000_003 + step)
        score = torch.rand(index.shape, device=device, generator=random_of_step) + 2.0 * (
            answer & follows
        )
        best = score.topk(n_anchors, 1)
        anchors, order = best.indices.sort(1)
        kept = (best.values > 2.0).gather(1, order)
        position = anchors[..., None] + torch.arange(k, device=device)  # [B, A, k]
        flat = (starts[..., None] + position).clamp(max=len(store.ids) - 1)
        label_at = position + 1
        label_inside = label_at < lengths[..., None]
        labels = store.ids[(starts[..., None] + label_at).clamp(max=len(store.ids) - 1)]
        is_answer = store.answer[(starts[..., None] + label_at).clamp(max=len(store.ids) - 1)]
        mask = (label_inside & is_answer & kept[..., None]).float().cumprod(-1)
        tokens = torch.full_like(position, d.mask_id)
        tokens[..., 0] = store.ids[flat[..., 0]]
        context_position = torch.where(inside, place, -1)
        inputs = self.embedding[tokens].flatten(1, 2)
        blocks = Blocks(store.taps[index], context_position, anchors, inputs)
        hidden = self.drafter.hidden(blocks, self.optimizer.leaves)
        previous = store.ids[flat]
        logits = (
            F.linear(hidden, self.head).float()
            + markov_bias(previous, self.optimizer.leaves).float()
        )
        target = F.linear(store.hidden[flat], self.head)
        confidence = confidence_logits(hidden, previous, self.optimizer.leaves)
        return block_loss(logits, confidence, target, labels, mask, self.recipe.gamma)

    def _factor(self, step: int) -> float:
        recipe = self.recipe
        if step < recipe.warmup:
            return (step + 1) / recipe.warmup
        progress = torch.tensor((step - recipe.warmup) / max(1, recipe.n_steps - recipe.warmup))
        return float(0.02 + 0.98 * 0.5 * (1 + torch.cos(torch.pi * progress)))

    def _report(self, pending: list[Tensor], seconds: float) -> None:
        total, ce, l1, confidence, tau = torch.stack(pending).mean(0).tolist()
        self.log.append(
            {
                "step": self.step,
                "loss": total,
                "ce": ce,
                "l1": l1,
                "confidence": confidence,
                "tau": tau,
            }
        )
        print(
            f"drafter {self.dims.flavour} step {self.step}/{self.recipe.n_steps} loss {total:.4f} l1 {l1:.4f} "
            f"tau {tau:.2f} {seconds:.0f} s",
            flush=True,
        )
        if total != total:
            raise FloatingPointError(
                f"drafter loss is not finite at step {self.step}; lower the rates"
            )

    def _checkpoint(self) -> None:
        checkpoint.save(self.file, self.optimizer.state(), self.recipe, self.step, self.log)

    def _resume(self) -> None:
        saved = checkpoint.resume(self.file, self.recipe)
        if saved is not None:
            state, self.step, self.log = saved
            self.optimizer.restore(state)

    def export(self, out: Path) -> None:
        """Write `config.json` and bf16 `model.safetensors` (vectors and confidence too, as published drafts do)."""
        out.mkdir(parents=True, exist_ok=True)
        tensors = {
            n: v.detach().bfloat16().contiguous().cpu() for n, v in self.optimizer.masters().items()
        }
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps(draft_config(self.dims), indent=1) + "\n")


def load_draft(
    folder: Path, dims: DraftDims, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Parameters of an exported drafter: matrices in `dtype`, the rest fp32."""
    tensors = load_file(folder / "model.safetensors")
    if {n: tuple(v.shape) for n, v in tensors.items()} != dims.shapes():
        raise ValueError(f"{folder}: tensors do not fit the {dims.flavour} drafter; train it again")
    return {n: v.to(device, dtype if is_muon(n) else torch.float32) for n, v in tensors.items()}


def _pools(store: Store, recipe: DrafterRecipe) -> list[Tensor]:
    """Sequences of each bucket: those that fit it and not the one before."""
    pools: list[Tensor] = []
    below = 0
    for rows, *_ in recipe.buckets:
        pools.append(torch.nonzero((store.lengths <= rows) & (store.lengths > below))[:, 0])
        below = rows
    return pools


def draft_config(d: DraftDims) -> dict[str, Any]:
    """config.json in the dialect of the flavour's published checkpoints, with every choice of ours written out."""
    shared: dict[str, Any] = {
        "hidden_size": d.hidden,
        "intermediate_size": d.intermediate,
        "num_hidden_layers": d.n_layers,
        "num_attention_heads": d.heads,
        "hidden_act": "silu",
        "rms_norm_eps": d.eps,
        "vocab_size": d.vocab,
        "rope_theta": d.theta,
        "rope_scaling": None,
        "max_position_embeddings": 16_384,
        "block_size": d.block,
        "dtype": "bfloat16",
    }
    choices: dict[str, Any] = {
        "target_layer_ids": list(d.taps),
        "tap_stream": "prefix",
        "mask_token_id": d.mask_id,
        "target_hidden_size": d.target_hidden,
        "target_num_hidden_layers": 13,
        "markov_rank": d.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "slot_convention": "anchor_predicts",
        "draft_window": None,
        "causal_block": False,
    }
    if d.flavour == "gqa":
        return {
            "architectures": ["DSparkDraftModel"],
            "model_type": "qwen3",
            **shared,
            "num_key_value_heads": d.kv_heads,
            "head_dim": d.head_dim,
            "attention_bias": False,
            "rope_interleave": False,
            "dflash_config": choices,
        }
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        **shared,
        "q_lora_rank": d.q_lora,
        "kv_lora_rank": d.kv_lora,
        "qk_nope_head_dim": d.nope,
        "qk_rope_head_dim": d.rope,
        "v_head_dim": d.v_dim,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "rope_interleave": True,
        **choices,
    }
