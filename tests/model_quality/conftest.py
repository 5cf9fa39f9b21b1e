"""The served model's folder, and one cluster for all tests of this folder.

`K3_MODEL__PATH` chooses another folder, as it does for the services. Floors only make sense for a model that was made
for these suites: its `eval.json` states its accuracy on each of them. A folder without such figures is skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster

EMBEDDED = Path(__file__).parents[2] / "k3" / "assets" / "tiny"


@pytest.fixture(scope="session")
def folder() -> Path:
    """The model under test."""
    return Path(os.environ.get("K3_MODEL__PATH") or EMBEDDED)


@pytest.fixture(scope="session")
def stated(folder: Path) -> dict[str, float]:
    """Accuracy by suite as the model's own evaluation states it."""
    path = folder / "eval.json"
    figures = json.loads(path.read_text()) if path.exists() else {}
    found = {name: f["accuracy"] for name, f in figures.items() if isinstance(f, dict)}
    if not found:
        pytest.skip(f"{path} states no accuracy on the frozen suites; run `training` with it")
    return found


@pytest.fixture(scope="session")
def cluster(stated: dict[str, float]) -> Iterator[Cluster]:
    """Router, prefill and decode as a newcomer runs them."""
    with Cluster() as running:
        yield running
