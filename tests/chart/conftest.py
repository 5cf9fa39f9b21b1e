"""Render the chart with a real helm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.chart.rendered import CHART, ROOT, VALUES, Helm, Rendered


@pytest.fixture(scope="session")
def helm() -> Helm:
    """`helm(*arguments)`: run it, return what happened."""
    found = subprocess.run(
        [sys.executable, ROOT / ".ci/helm.py"], check=True, capture_output=True, text=True
    )
    binary = found.stdout.strip()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binary, *arguments], check=False, capture_output=True, text=True, timeout=60
        )

    return run


@pytest.fixture(scope="session")
def render(helm: Helm) -> Callable[..., Rendered]:
    """`render(values_file, *sets)`: objects of the release `k3` in namespace `serving`."""

    def run(values: Path = VALUES[0], *sets: str) -> Rendered:
        chosen = [word for s in sets for word in ("--set", s)]
        done = helm("template", "k3", str(CHART), "-n", "serving", "--values", str(values), *chosen)
        assert done.returncode == 0, done.stderr
        return Rendered(tuple(o for o in yaml.safe_load_all(done.stdout) if o))

    return run


@pytest.fixture(scope="session", params=VALUES, ids=lambda p: p.stem)
def rendered(request: pytest.FixtureRequest, render: Callable[..., Rendered]) -> Rendered:
    """Every example in turn, the defaults first."""
    return render(request.param)
