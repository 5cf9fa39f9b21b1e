"""`python -m training.run --preset k3-mini [--smoke]`: all phases, each resumable, each also alone with `--phase`.

Phases: tokenizer, target (checkpoints, exported folder, loss plot), evaluate, drafters (data, both flavours),
rollouts, finish (tokenizer twin, samples, model card). Everything is written under `--folder`; the finished
model is its `k3-mini/`.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from training import tokenizer
from training.data.corpus import texts
from training.drafters import measure_all, train_all
from training.evaluate import Model, evaluate
from training.export import to_hf, write_shards
from training.finish import finish
from training.plot import plot_losses
from training.recipe import Recipe, smoke
from training.repeatable import fixed_order
from training.train_target import TargetRun

PHASES = ("tokenizer", "target", "evaluate", "drafters", "rollouts", "finish")


class Run:
    """The phases over one folder."""

    def __init__(
        self, recipe: Recipe, folder: Path, device: torch.device, *, repeatable: bool = False
    ) -> None:
        self.recipe, self.folder, self.device = recipe, folder, device
        self.repeatable = repeatable
        self.model = folder / "k3-mini"
        self.tokenizer = self.model / "tiktoken.model"
        self.model.mkdir(parents=True, exist_ok=True)

    def make_tokenizer(self) -> None:
        """Learn the ranks, write both files."""
        if self.tokenizer.exists():
            return
        ranks = tokenizer.train(texts(n_samples=self.recipe.tokenizer_samples))
        part = self.tokenizer.with_suffix(".part")
        tokenizer.write_tiktoken(ranks, part)
        part.rename(self.tokenizer)

    def train_target(self, until: int | None = None) -> None:
        """Train or resume, then export the folder and plot the loss."""
        if not self.tokenizer.exists():
            raise FileNotFoundError(f"{self.tokenizer}: run the tokenizer phase first")
        run = TargetRun(self.recipe.target, self.folder / "checkpoints", self.device)
        with fixed_order(self.repeatable):
            run.run(self.tokenizer, until)
        run.export(self.model)
        write_shards(to_hf(run.values(), quantize=False), self.folder / "bf16")
        plot_losses(run.log, ("loss", "answer"), self.folder / "target-loss.png")

    def evaluate(self) -> None:
        """Score the exported folder on the frozen suites."""
        model = Model.load(self.model, self.tokenizer, self.device)
        evaluate(model, self.recipe, self.model / "eval.json")

    def train_drafters(self) -> None:
        """Train both flavours against the exported target."""
        model = Model.load(self.model, self.tokenizer, self.device)
        train_all(model, self.recipe.drafter, self.folder / "checkpoints", self.model)

    def measure_drafters(self) -> None:
        """Rollouts over the frozen suites."""
        model = Model.load(self.model, self.tokenizer, self.device)
        measure_all(model, self.recipe, self.model)

    def finish(self) -> None:
        """Chat format, tokenizer twin, samples, model card."""
        finish(self.model, self.recipe)


def main() -> None:
    """Parse and run the phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=("k3-mini",), required=True)
    parser.add_argument("--smoke", action="store_true", help="all phases on a CPU in under 90 s")
    parser.add_argument(
        "--folder", type=Path, default=Path("training-run"), help="where everything is written"
    )
    parser.add_argument("--phase", choices=PHASES)
    parser.add_argument("--items", type=int, help="items of each suite to score (default: all)")
    parser.add_argument("--until", type=int, help="stop the target at this step")
    parser.add_argument(
        "--repeatable",
        action="store_true",
        help="sums in a fixed order while the target trains: two runs give the same bits; slower",
    )
    arguments = parser.parse_args()
    use_gpu = torch.cuda.is_available() and not arguments.smoke  # noqa: TID251
    device = torch.device("cuda" if use_gpu else "cpu")
    recipe = smoke() if arguments.smoke else Recipe()
    if arguments.items is not None:
        recipe = replace(recipe, eval_items=arguments.items)
    run = Run(recipe, arguments.folder, device, repeatable=arguments.repeatable)
    phases: dict[str, Callable[[], None]] = {
        "tokenizer": run.make_tokenizer,
        "target": lambda: run.train_target(arguments.until),
        "evaluate": run.evaluate,
        "drafters": run.train_drafters,
        "rollouts": run.measure_drafters,
        "finish": run.finish,
    }
    for name, phase in phases.items():
        if arguments.phase in (None, name):
            began = time.monotonic()
            phase()
            print(f"phase {name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
