"""Checkpoints of a training run: one file each, whole or not there, and resumed by the recipe that wrote them alone."""

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

Log = list[dict[str, float]]


def save(file: Path, state: dict[str, Tensor], recipe: object, step: int, log: Log) -> None:
    """State after `step` steps, and what they reported, in place of the checkpoint before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    metadata = {"step": str(step), "log": json.dumps(log), "recipe": repr(recipe)}
    save_file({name: value.contiguous() for name, value in state.items()}, part, metadata)
    part.rename(file)


def resume(file: Path, recipe: object) -> tuple[dict[str, Tensor], int, Log] | None:
    """State, step and log; None without a checkpoint. Raises ValueError for one of another recipe."""
    if not file.exists():
        return None
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata() or {}
    if "log" not in metadata or metadata["recipe"] != repr(recipe):
        raise ValueError(
            f"{file} is of another recipe or form; name another --folder, or remove it"
        )
    return load_file(file), int(metadata["step"]), json.loads(metadata["log"])
