"""`k3-local` whose output nobody reads any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STOP_S = 60.0


@pytest.mark.e2e
def test_it_stops_when_the_reader_of_its_output_is_gone(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "k3.launch", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        process.wait(STOP_S)
        assert process.stderr.read() == ""
        assert process.returncode == 0
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
