"""Settings every test shares: one CPU thread per process, hypothesis profiles, plain floating point."""

import os
import sys
from collections.abc import Generator, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests.e2e.cluster import Cluster

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test that shares a cluster shows what its services said last."""
    report = yield
    cluster = item.funcargs.get("cluster") if isinstance(item, pytest.Function) else None
    if report.failed and isinstance(cluster, Cluster):
        lines = [f"[{name}] {line}" for name, line in cluster.logs[-200:]]
        report.sections.append(("last lines of the cluster", "\n".join(lines)))
    return report
