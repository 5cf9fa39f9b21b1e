"""What an idle cluster answers and costs: probes, memory of fronts and router, processor time, torch in ranks only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3.cluster import get
from tests.chart.rendered import PROBES
from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.e2e

IDLE_S = 8.0  # long enough for several heartbeats, snapshots and mover naps
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@pytest.mark.parametrize("path", [*PROBES.values(), "/metrics", "/version"])
def test_every_process_answers_what_the_chart_and_its_monitors_ask(
    cluster: Cluster, path: str
) -> None:
    statuses = {m.name: get(m.ops, path).status for m in cluster.members}
    assert statuses == {m.name: 200 for m in cluster.members}


def test_fronts_and_router_are_small(cluster: Cluster) -> None:
    limits = {m.name: (120.0 if m is cluster.router else 80.0) for m in cluster.members}
    sizes = {m.name: resident_mb(m.pid) for m in cluster.members}
    assert all(sizes[name] < limits[name] for name in sizes), sizes


def test_torch_is_in_the_ranks_only(cluster: Cluster) -> None:
    def has_torch(pid: int) -> bool:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()

    assert not any(has_torch(m.pid) for m in cluster.members)
    engines = [*cluster.prefills, *cluster.decodes]
    assert all(has_torch(pid) for m in engines for pid in cluster.ranks(m))


def test_an_idle_cluster_takes_less_than_a_tenth_of_a_core(cluster: Cluster) -> None:
    pids = [m.pid for m in cluster.members]
    pids += [pid for m in cluster.members for pid in cluster.ranks(m)]
    before = {pid: processor_s(pid) for pid in pids}
    time.sleep(IDLE_S)  # processor time over a stretch, which is what is measured
    used = {pid: processor_s(pid) - before[pid] for pid in pids}
    assert sum(used.values()) < 0.1 * IDLE_S, used
