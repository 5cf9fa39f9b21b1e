"""Holds a run against its own repetition: `python -m training.check_repeat --steps 40`.

Trains the first steps of the recipe twice from the same seed and compares every parameter bit by bit. Prints the first
step whose loss differs, the largest difference and the seconds per step; fails when the bits differ.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from training import tokenizer
from training.data.corpus import texts
from training.data.packing import Feed, Plan
from training.recipe import Recipe, smoke
from training.repeatable import fixed_order
from training.train_target import TargetRun


def first_steps(
    recipe: Recipe, ranks: Path, n_steps: int, device: torch.device
) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses per step, parameters afterwards, seconds per step without the first."""
    target = recipe.target
    plan = Plan(target.n_tokens, n_steps, target.seed, target.mixture, ranks)
    run = TargetRun(target, ranks.parent / "unused", device)
    losses: list[Tensor] = []
    began = time.monotonic()
    with Feed(plan, target.n_workers) as feed:
        for step in range(n_steps):
            losses.append(run.train_step(feed.take()))
            if step == 0:
                losses[0].tolist()  # waits for kernels to be compiled
                began = time.monotonic()
            run.step += 1
        values = [loss[0].item() for loss in losses]
    seconds = (time.monotonic() - began) / max(1, n_steps - 1)
    return values, {name: value.clone() for name, value in run.values().items()}, seconds


def main() -> None:
    """Print the comparison; exit 1 when the two runs differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--smoke", action="store_true", help="the CPU's short recipe")
    parser.add_argument(
        "--fast", action="store_true", help="let the device choose the order of sums"
    )
    arguments = parser.parse_args()
    use_gpu = torch.cuda.is_available() and not arguments.smoke  # noqa: TID251
    device = torch.device("cuda" if use_gpu else "cpu")
    recipe = smoke() if arguments.smoke else Recipe()
    recipe = replace(recipe, target=replace(recipe.target, warmup=1))
    with tempfile.TemporaryDirectory() as folder:
        ranks = Path(folder) / "tiktoken.model"
        tokenizer.write_tiktoken(tokenizer.train(texts(n_samples=recipe.tokenizer_samples)), ranks)
        with fixed_order(not arguments.fast):
            a, first, _ = first_steps(recipe, ranks, arguments.steps, device)
            b, second, seconds = first_steps(recipe, ranks, arguments.steps, device)
    apart = next((i + 1 for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
    worst = max(float((first[name] - second[name]).abs().max()) for name in first)
    print(
        f"{seconds:.3f} s a step; losses differ from step {apart}; largest difference {worst:.3e}"
    )
    if worst != 0 or apart is not None:
        raise SystemExit(f"two runs of {arguments.steps} steps differ: a sum has no fixed order")


if __name__ == "__main__":
    main()
