"""The self-test of transfers between two processes, without a service around it."""

from __future__ import annotations

import numpy as np
import pytest

from k3.transfer.agent import Region
from k3.transfer.self_test import BYTES, measure

pytestmark = pytest.mark.e2e


def region(memory: np.ndarray, kind: str = "DRAM", device: int = 0) -> Region:
    return Region("pool", memory.ctypes.data, device, kind, 64, memory.nbytes // 64)


class Recording:
    """Counts how often the device is kept from being recorded."""

    def __init__(self) -> None:
        self.n_held = 0
        self.is_held = False

    def __enter__(self) -> None:
        assert not self.is_held, "a lock of one thread"
        self.n_held += 1
        self.is_held = True

    def __exit__(self, *_: object) -> None:
        self.is_held = False


def test_the_largest_pool_is_written_and_its_rate_told(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger="k3.transfer")
    small, large = np.zeros(64, np.uint8), np.zeros(1 << 20, np.uint8)
    assert large.nbytes < BYTES
    recording = Recording()
    found = measure([region(small), region(large)], 0.001, recording)
    assert not recording.is_held
    assert recording.n_held >= 5, "building, registering, connecting, each write, closing"
    assert found.problem == ""
    assert found.bytes_per_s > 1e6
    assert f"{large.nbytes} bytes of DRAM" in caplog.text


def test_a_peer_that_cannot_start_is_a_problem_and_no_exception():
    recording = Recording()
    found = measure([region(np.zeros(64, np.uint8), "VRAM", device=99)], 0.001, recording)
    assert recording.n_held == 0, "not while the other process starts"
    assert found.bytes_per_s == 0
    assert "the other process ended with code 1" in found.problem
    assert "transfer.min_bandwidth=0.001" in found.problem
