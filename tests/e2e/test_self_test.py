"""The start-up self-test of transfers: a floor that cannot be met keeps an instance from being ready, and says why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from k3.cluster import Get, get
from k3.ports import free_ports
from k3.process import die_with_parent

pytestmark = pytest.mark.e2e

GOLDEN = Path(__file__).parents[1] / "golden" / "k3"
START_S = 120.0


@contextmanager
def instance(service: str, floor: str, log: Path) -> Iterator[str]:
    """A running engine; yields the address of its probes once its ranks are up."""
    port, ops = free_ports(2)
    flags = ["--model-path", GOLDEN, "--model-device", "cpu", "--model-max-model-len", 256]
    flags += ["--cache-pages", 32, "--serve-port", port, "--serve-ops-port", ops]
    flags += ["--transfer-min-bandwidth", floor]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", service, *map(str, flags)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            preexec_fn=die_with_parent(),
        )
    try:
        address, end = f"127.0.0.1:{ops}", time.monotonic() + START_S
        while get(address, "/startup").status != 200:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        yield address
    finally:
        process.kill()
        process.wait()


def measured(address: str) -> float:
    """Bytes per second, as the metric shows them."""
    text = get(address, "/metrics").body
    found = re.search(r"^k3_transfer_self_test_bytes_per_second (\S+)$", text, re.M)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("service", ["prefill_svc", "decode_svc"])
def test_an_instance_below_its_floor_is_not_ready_and_says_why(
    service: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with instance(service, "1000000", log) as address:
        answer: Get = get(address, "/ready")
        assert answer.status == 503
        (reason,) = json.loads(answer.body)["reasons"]
        assert reason["code"] == "transfer_slow"
        for part in ("rank 0", "GB/s", "transfer.min_bandwidth=1e+06", "UCX_TLS"):
            assert part in reason["detail"]
        assert measured(address) > 0
    assert "transfer self-test failed" in log.read_text()


@pytest.mark.parametrize("floor", ["0.001", "0"])
def test_an_instance_above_its_floor_or_without_one_is_ready(floor: str, tmp_path: Path) -> None:
    with instance("prefill_svc", floor, tmp_path / "log") as address:
        assert get(address, "/ready").status == 200
        assert (measured(address) > 0) == (floor != "0")
