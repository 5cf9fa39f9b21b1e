"""`benchmarks/validate.py` as a command on a CPU: ranks of every layout, agents, table and plot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "validate.py"


def test_steps_and_transfers_leave_figures_a_table_and_a_plot(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--gpus", "2", "--depth", "4", "--out", str(tmp_path))
    small = ("--contexts", "128", "--batches", "3", "--pool-gib", "0.01", "--alone", "4")

    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, *small, "--parts", "steps,transfer"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.json")
    parts = json.loads(file.read_text())["parts"]
    seen = {(p["layout"], p["ranks"], p["rows"], p["group"]) for p in parts["steps"]["points"]}
    layouts = (("one", 1), ("tp", 2), ("cp", 2), ("tp", 4), ("cp", 4))
    assert seen == {(*layout, 3, group) for layout in layouts for group in (1, 8)}
    assert {m["what"] for m in parts["steps"]["messages"]} == {"sum", "exchange"}
    assert all(rate["right"] for rate in parts["transfer"]["rates"])
    assert parts["transfer"]["rates"]
    table = file.with_suffix(".md").read_text()
    assert "| cp 2 |" in table
    assert "| cp 4, one rank |" in table
    assert file.with_suffix(".png").stat().st_size > 0


def test_more_gpus_than_there_are_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--gpus", "99", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert "--gpus 99: torch sees" in done.stderr
