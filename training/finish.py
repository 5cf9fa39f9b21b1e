"""The last phase: what a model folder holds beside weights: chat format, tokenizer twin, samples, model card.

`samples.json` pins greedy continuations of a float32 CPU run with the smallest gap between the two best logits on
the way; other implementations are compared where the gap exceeds 1e-3.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from k3.bench.suites import Item, longest_answer, read
from training.card import card
from training.chat import CHAT_FORMAT
from training.evaluate import Model
from training.kernels import Layout
from training.recipe import Recipe


def finish(folder: Path, recipe: Recipe) -> None:
    """Complete the folder; needs weights, config.json and tiktoken.model in it, and the extra `router` installed."""
    # imported here, so that GPU machines train without the router's packages
    from router.text.export import export

    if CHAT_FORMAT.parent.resolve() != folder.resolve():
        shutil.copy(CHAT_FORMAT, folder / "chat_format.json")
    config = json.loads((folder / "config.json").read_text())
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(
        json.dumps({**generation, "temperature": 1.0}, indent=1) + "\n"
    )
    export(folder)
    model = Model.load(folder, folder / "tiktoken.model", torch.device("cpu"))
    samples = [
        sample(model, name, item, min(longest_answer(name), recipe.answer_cap))
        for name, n in recipe.samples
        for item in read(name, n)
    ]
    (folder / "samples.json").write_text(json.dumps(samples, indent=1, ensure_ascii=False) + "\n")
    (folder / "README.md").write_text(card(folder, recipe), encoding="utf-8")


def sample(model: Model, suite: str, item: Item, max_new: int) -> dict[str, Any]:
    """One prompt with its greedy continuation, checked by a second, uncached pass that gives the gaps."""
    prompt = model.prompt(item)
    answer = model.generator().run([prompt], max_new)[0]
    ids = torch.tensor(prompt + answer)
    with torch.no_grad():
        layout = Layout.of(torch.tensor([0, len(ids)]), model.device)
        hidden = model.target(ids, layout, model.params).hidden[len(prompt) - 1 : -1]
        logits = F.linear(hidden, model.params.top["lm_head.weight"])
    special = model.codec.special
    logits[:, [special.mask, special.pad]] = float("-inf")
    best = logits.topk(2, -1)
    if best.indices[:, 0].tolist() != answer:
        raise ValueError(f"{item.id}: cached and uncached greedy continuations differ")
    decode = model.codec.encoding.decode
    return {
        "task": suite,
        "id": item.id,
        "prompt_ids": prompt,
        "answer_ids": answer,
        "is_right": model.is_right(item, answer),
        "min_top2_gap": round(float((best.values[:, 0] - best.values[:, 1]).min()), 4),
        "prompt": decode(prompt),
        "answer": decode(answer),
    }
