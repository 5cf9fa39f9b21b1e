"""The target phase: packed batches in, checkpoints, a loss log and an exported model folder out. Resumable."""

import json
import time
from pathlib import Path

import torch
from torch import Tensor

from training import checkpoint
from training.data.packing import Batch, Feed, Plan
from training.dims import Dims
from training.export import to_hf, write_shards
from training.kernels import Layout, kernels_for
from training.optimizer import Optimizer
from training.parameters import initial, is_muon
from training.recipe import TargetRecipe, model_config
from training.target import LayeredParams, Target

_HEAD_CHUNK = 16_384
_BIAS = "e_score_correction_bias"


class TargetRun:
    """One training run of the target in `folder`; `device` decides kernels, precision and compilation."""

    def __init__(self, recipe: TargetRecipe, folder: Path, device: torch.device) -> None:
        self.recipe, self.file, self.device = recipe, folder / "target.safetensors", device
        self.dims = Dims.of(model_config())
        on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.target = Target(self.dims, kernels_for(device), compiled=on_gpu)
        values = {n: v.to(device) for n, v in initial(self.dims, recipe.seed).items()}
        self.optimizer = Optimizer(
            values,
            is_muon,
            slow=lambda name: name.endswith("block_sparse_moe.gate.weight"),
            frozen=lambda name: name.endswith(_BIAS),
            leaf_dtype=self.dtype,
            lr_muon=recipe.lr_muon,
            lr_adam=recipe.lr_adam,
        )
        self.params = LayeredParams.of(self.optimizer.leaves, self.dims.n_layers, self.dtype)
        self.step = 0
        self.log: list[dict[str, float]] = []

    def run(self, tokenizer: Path, until: int | None = None) -> None:
        """Train up to step `until` (default: all), from the last checkpoint if there is one."""
        self._resume()
        recipe = self.recipe
        until = min(until or recipe.n_steps, recipe.n_steps)
        plan = Plan(recipe.n_tokens, recipe.n_steps, recipe.seed, recipe.mixture, tokenizer)
        began, pending = time.monotonic(), []
        with Feed(plan, recipe.n_workers, self.step) as feed:
            while self.step < until:
                pending.append(self.train_step(feed.take()))
                self.step += 1
                if self.step % 25 == 0 or self.step in (1, until):
                    self._report(pending, time.monotonic() - began)
                    pending = []
                if self.step % recipe.checkpoint_every == 0 or self.step == until:
                    self._checkpoint()

    def train_step(self, batch: Batch) -> Tensor:
        """One update; returns [loss, answer loss, largest expert load / mean] on the device."""
        recipe, device = self.recipe, self.device
        ids = torch.from_numpy(batch.ids.copy()).to(device, non_blocking=True).long()
        kinds = torch.from_numpy(batch.classes.copy()).to(device, non_blocking=True)
        layout = Layout.of(torch.from_numpy(batch.starts.copy()), device)
        targets = torch.cat((ids[1:], ids[:1]))
        kind = torch.cat((kinds[1:], kinds.new_zeros(1)))
        weights = (kind == 2).float() + recipe.prompt_weight * (kind == 1).float()
        traced = self.target(ids, layout, self.params)
        total = weights.sum()
        answers = (kind == 2).float()
        sums: list[Tensor] = []
        for a in range(0, len(ids), _HEAD_CHUNK):
            b = a + _HEAD_CHUNK
            sums.append(
                self.target.head_loss(
                    traced.hidden[a:b], targets[a:b], weights[a:b], answers[a:b],
                    self.params.top["lm_head.weight"],
                )
            )  # fmt: skip
        both = torch.stack(sums).sum(0)
        loss = both[0] / total
        loss.backward()
        factor = recipe.factor(self.step)
        self.optimizer.step(factor)
        worst = self._balance(traced.loads, factor)
        return torch.stack((loss.detach(), both[1].detach() / answers.sum().clamp(min=1), worst))

    @torch.no_grad()
    def _balance(self, loads: list[Tensor], factor: float) -> Tensor:
        """Nudge the routing bias of each expert towards equal load; returns the largest relative load."""
        biases = [leaf for name, leaf in self.optimizer.leaves.items() if name.endswith(_BIAS)]
        relative = torch.stack([load / load.mean() for load in loads])
        for bias, row in zip(biases, relative, strict=True):
            bias += self.recipe.balance * factor * torch.sign(1 - row)
        return relative.max()

    def _report(self, pending: list[Tensor], seconds: float) -> None:
        loss, answer, load = torch.stack(pending).mean(0).tolist()
        self.log.append(
            {"step": self.step, "loss": loss, "answer": answer, "load": load, "s": seconds}
        )
        print(
            f"target step {self.step}/{self.recipe.n_steps} loss {loss:.4f} answer {answer:.4f} "
            f"load {load:.2f} {seconds:.0f} s",
            flush=True,
        )
        if loss != loss:
            raise FloatingPointError(f"loss is not finite at step {self.step}; lower the rates")

    def _checkpoint(self) -> None:
        checkpoint.save(self.file, self.optimizer.state(), self.recipe, self.step, self.log)

    def _resume(self) -> None:
        saved = checkpoint.resume(self.file, self.recipe)
        if saved is not None:
            state, self.step, self.log = saved
            self.optimizer.restore(state)
            print(f"target: resumed at step {self.step}", flush=True)

    def values(self) -> dict[str, Tensor]:
        """fp32 values by name."""
        return {name: value.float() for name, value in self.optimizer.masters().items()}

    def export(self, out: Path) -> None:
        """Write the model folder's weights and config."""
        write_shards(to_hf(self.values()), out)
        (out / "config.json").write_text(json.dumps(model_config(), indent=1) + "\n")
