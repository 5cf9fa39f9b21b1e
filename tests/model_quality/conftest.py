"""The served model's folder, and one cluster for all tests of this folder.

`K3_MODEL__PATH` chooses another folder, as it does for the services: a newly trained one is held against these floors
before it is shipped.
"""

from __future__ import annotations

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
def cluster() -> Iterator[Cluster]:
    """Router, prefill and decode as a newcomer runs them, with the model's own drafter."""
    drafter = ("--spec-drafter", "draft-mla")
    with Cluster(
        prefill_flags=drafter, decode_flags=(*drafter, "--spec-draft-tokens", "7")
    ) as running:
        yield running
