"""Scores a model folder on the frozen suites, greedy, with the zeroed-state ablations of the recall suites."""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from k3.bench.scoring import is_right, response_of
from k3.bench.suites import Item, longest_answer, read
from training import tokenizer
from training.chat import ChatCodec
from training.dims import Dims
from training.export import from_hf, read_folder
from training.generate import Ablation, Generator
from training.kernels import kernels_for
from training.parameters import is_bf16
from training.recipe import Recipe
from training.target import LayeredParams, Target

_CACHE_TOKENS = 1_200_000


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model folder."""

    target: Target
    params: LayeredParams
    codec: ChatCodec
    device: torch.device

    @staticmethod
    def load(folder: Path, tokenizer_file: Path, device: torch.device) -> "Model":
        """Load with packed experts unpacked; bf16 matrices on GPU, fp32 on CPU."""
        config, tensors = read_folder(folder)
        dims = Dims.of(config)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        flat = {
            name: value.to(device=device, dtype=dtype if is_bf16(name) else torch.float32)
            for name, value in from_hf(tensors, dims.kda_heads).items()
        }
        params = LayeredParams.of(flat, dims.n_layers, dtype)
        codec = ChatCodec(tokenizer.load(tokenizer_file))
        return Model(Target(dims, kernels_for(device)), params, codec, device)

    def generator(self) -> Generator:
        """A generator that never produces MASK or PAD."""
        special = self.codec.special
        return Generator(
            self.target, self.params, special.end_of_msg, (special.mask, special.pad), self.device
        )

    def prompt(self, item: Item) -> list[int]:
        """Prompt ids of an item."""
        return self.codec.prompt(item.turns, item.tools)

    def is_right(self, item: Item, ids: Sequence[int]) -> bool | None:
        """Score one continuation by the item's check; None when the item has no right answer."""
        raw = self.codec.encoding.decode(list(ids))
        return is_right(item.check, item.answer, response=response_of(raw), raw=raw)

    def answers(
        self, items: Sequence[Item], cap: int, ablation: Ablation = Ablation.NONE
    ) -> list[list[int]]:
        """Greedy continuations, in batches bounded by cache size."""
        max_new = min(cap, longest_answer(items[0].id.split("-")[0]))
        prompts = [self.prompt(item) for item in items]
        batch = max(1, _CACHE_TOKENS // (max(map(len, prompts)) + max_new))
        generator = self.generator()
        out: list[list[int]] = []
        for a in range(0, len(prompts), batch):
            out += generator.run(prompts[a : a + batch], max_new, ablation=ablation)
        return out


def evaluate(model: Model, recipe: Recipe, out: Path) -> dict[str, object]:
    """Accuracy, share of self-ending answers and n per suite; writes eval.json and returns it."""
    report: dict[str, object] = {}
    for name in recipe.suites:
        items = read(name, recipe.eval_items)
        began = time.monotonic()
        report[name] = _score(model, items, recipe.answer_cap, Ablation.NONE)
        if name.startswith(("passkey", "facts16")):
            for ablation in (Ablation.LATENTS, Ablation.STATES):
                report[f"{name}/{ablation.value}"] = _score(
                    model, items[:100], recipe.answer_cap, ablation
                )
        print(f"eval {name}: {report[name]} {time.monotonic() - began:.1f} s", flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _score(model: Model, items: Sequence[Item], cap: int, ablation: Ablation) -> dict[str, object]:
    answers = model.answers(items, cap, ablation)
    scores = [model.is_right(item, ids) for item, ids in zip(items, answers, strict=True)]
    right = [score for score in scores if score is not None]
    eos = model.codec.special.end_of_msg
    result: dict[str, object] = {
        "accuracy": round(sum(right) / len(right), 4) if right else None,
        "self_ending": round(sum(ids[-1] == eos for ids in answers) / len(answers), 4),
        "n": len(items),
    }
    if items[0].id.startswith("arith_skeletons"):
        groups: defaultdict[str, list[bool]] = defaultdict(list)
        for item, ok in zip(items, right, strict=True):
            groups[item.id.rsplit("-", 1)[0].removeprefix("arith_skeletons-")].append(ok)
        result["by_skeleton"] = {key: round(sum(v) / len(v), 3) for key, v in groups.items()}
    return result
