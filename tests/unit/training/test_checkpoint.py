"""Checkpoints: what is resumed is what was saved, of one step, by one recipe."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from training import checkpoint
from training.recipe import Recipe, smoke


def test_a_run_goes_on_where_its_last_checkpoint_was(tmp_path: Path) -> None:
    file, recipe = tmp_path / "checkpoints/target.safetensors", smoke().target
    assert checkpoint.resume(file, recipe) is None
    for step in (1, 2):
        state = {"weight": torch.full((3, 2), float(step)).T}
        checkpoint.save(file, state, recipe, step, [{"step": i, "loss": 0.5} for i in range(step)])
    saved = checkpoint.resume(file, recipe)
    assert saved is not None
    state, step, log = saved
    assert torch.equal(state["weight"], torch.full((2, 3), 2.0))
    assert (step, log) == (2, [{"step": 0, "loss": 0.5}, {"step": 1, "loss": 0.5}])
    assert list(file.parent.iterdir()) == [file]


def test_a_checkpoint_of_another_recipe_is_not_gone_on_with(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "target", {"weight": torch.zeros(1)}, smoke().target, 1, [])
    with pytest.raises(ValueError, match="another recipe"):
        checkpoint.resume(tmp_path / "target", Recipe().target)


@pytest.mark.parametrize("metadata", [None, {"step": "1", "recipe": repr(smoke().target)}])
def test_a_checkpoint_whose_log_lay_beside_it_is_not_gone_on_with(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    save_file({"weight": torch.zeros(1)}, tmp_path / "target", metadata)
    with pytest.raises(ValueError, match="another recipe or form"):
        checkpoint.resume(tmp_path / "target", smoke().target)
