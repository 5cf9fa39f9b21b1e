"""The drafter phase: data once, then each flavour trained, exported and measured by rollouts."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from k3.bench.suites import longest_answer, read
from training.draft_data import run_target, sequences
from training.drafter import DraftDims
from training.evaluate import Model
from training.plot import plot_losses
from training.recipe import DrafterRecipe, Recipe
from training.rollouts import Acceptance, DraftAblation, Rollout, Trajectories, pooled, record
from training.train_drafter import DrafterRun, load_draft

FLAVOURS: tuple[Literal["mla", "gqa"], ...] = ("mla", "gqa")
_ARITHMETIC = ("arith_seen", "arith_forms", "arith_skeletons")
_SHORT = (*_ARITHMETIC, "copy", "lists", "tools", "chat")
_RECALL = ("passkey_1k", "facts16_1k", "passkey_4k", "facts16_4k")
_WARM = ("arith_seen", "open")


def train_all(model: Model, recipe: DrafterRecipe, checkpoints: Path, out: Path) -> None:
    """Train both flavours on one store and export them to `out/draft-mla` and `out/draft-gqa`."""
    began = time.monotonic()
    recorded = sequences(model, recipe)
    print(f"drafter data: {len(recorded)} sequences {time.monotonic() - began:.0f} s", flush=True)
    store = run_target(model, recorded, DraftDims("mla").taps)
    print(
        f"drafter data: {len(store.ids):,} tokens of taps {time.monotonic() - began:.0f} s",
        flush=True,
    )
    for flavour in FLAVOURS:
        run = DrafterRun(model, recipe, DraftDims(flavour), checkpoints)
        run.run(store)
        run.export(out / f"draft-{flavour}")
        plot_losses(run.log, ("loss", "l1"), checkpoints / f"draft-{flavour}-loss.png")


def measure_all(model: Model, recipe: Recipe, folder: Path) -> None:
    """Rollouts of both flavours over the frozen suites; writes `acceptance.json` as it goes."""
    taps = DraftDims("mla").taps
    greedy = [name for name in (*_SHORT, *_RECALL) if name in recipe.suites]
    hot = [name for name in _WARM if name in recipe.suites]
    recorded = {name: _record(model, recipe, name, 0.0, taps) for name in greedy}
    warm = {f"{name}@T1": _record(model, recipe, name, 1.0, taps) for name in hot}
    report: dict[str, dict[str, object]] = {}
    for flavour in FLAVOURS:
        dims = DraftDims(flavour)
        params = load_draft(folder / f"draft-{flavour}", dims, model.device, model.params.dtype)
        report[flavour] = _measure(Rollout(model, dims, params), recorded, warm, flavour)
        (folder / "acceptance.json").write_text(json.dumps(report, indent=1) + "\n")


def _record(
    model: Model, recipe: Recipe, name: str, heat: float, taps: tuple[int, ...]
) -> Trajectories:
    """Continuations of an even spread of a suite's items; half as many of the long suites."""
    n_items = (
        recipe.rollout_items if not name.endswith("_4k") else max(1, recipe.rollout_items // 2)
    )
    items = read(name)
    spread = items[:: max(1, len(items) // recipe.rollout_items)][:n_items]
    max_new = min(recipe.answer_cap, longest_answer(name))
    return record(model, [model.prompt(item) for item in spread], max_new, heat, taps)


def _measure(
    rollout: Rollout, recorded: dict[str, Trajectories], warm: dict[str, Trajectories], flavour: str
) -> dict[str, object]:
    full = {name: rollout.acceptance(t) for name, t in (recorded | warm).items()}
    report: dict[str, object] = {name: a.report() for name, a in full.items()}
    report["arithmetic"] = _pool(full, _ARITHMETIC)
    report["pooled"] = _pool(full, (*_SHORT, *_RECALL))
    narrow = {
        f"{name}@256": rollout.acceptance(recorded[name], window=256)
        for name in _RECALL
        if name in recorded
    }
    report |= {name: a.report() for name, a in narrow.items()}
    for ablation in DraftAblation:
        if ablation is not DraftAblation.NONE:
            parts = {
                name: rollout.acceptance(recorded[name], ablation=ablation)
                for name in _SHORT
                if name in recorded
            }
            report[f"arithmetic/{ablation.value}"] = _pool(parts, _ARITHMETIC)
            report[f"short/{ablation.value}"] = _pool(parts, _SHORT)
    report["short"] = _pool(full, _SHORT)
    lengths = {name: round(a.length, 2) for name, a in (full | narrow).items()}
    print(f"drafter {flavour} accepted length: {lengths}", flush=True)
    return report


def _pool(parts: dict[str, Acceptance], names: Sequence[str]) -> dict[str, object]:
    return pooled([parts[name] for name in names if name in parts]).report()
