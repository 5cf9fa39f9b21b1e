"""A child dies with its parent, even when the parent is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

PARENT = """
import subprocess, sys
from k3.process import die_with_parent
child = subprocess.Popen(["sleep", "60"], preexec_fn=die_with_parent())
print(child.pid, flush=True)
child.wait()
"""


def test_child_is_killed_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    watch = os.pidfd_open(child)
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=10)
        ended, _, _ = select.select([watch], [], [], 10.0)
        assert ended, f"child {child} outlived its parent"
    finally:
        os.close(watch)
        parent.stdout.close()
