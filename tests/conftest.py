"""Settings every test shares: one CPU thread per process, hypothesis profiles, plain floating point."""

import os
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "dev", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", parent=settings.get_profile("dev"), max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(autouse=True)
def keep_denormals() -> Iterator[None]:
    """A device opened in this process flushes denormals for good, which hypothesis refuses to work with."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_flush_denormal(False)
