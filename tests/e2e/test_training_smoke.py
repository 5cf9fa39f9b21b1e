"""The shortened training runs all its phases on a CPU and leaves a folder that the services can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from router.text.folder import load_model_folder
from tests.model_runner import solo_stage

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_a_shortened_training_ends_in_a_folder_that_can_be_served(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "training.run", "--preset", "k3-mini", "--smoke"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    model = tmp_path / "k3-mini"
    stage = solo_stage(model, "float32")
    text = load_model_folder(model, "smoke")
    assert stage.spec.vocab_size == text.vocab_size
    for flavour in ("draft-mla", "draft-gqa"):
        assert list((model / flavour).glob("*.safetensors")), f"{flavour} has no weights"
        assert (model / flavour / "config.json").exists()
    figures = json.loads((model / "eval.json").read_text())
    assert all(0 <= f["accuracy"] <= 1 for f in figures.values())
    assert (tmp_path / "target-loss.png").read_bytes().startswith(b"\x89PNG")
