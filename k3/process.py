"""A child process that never outlives its parent (Linux).

`die_with_parent` is handed to `subprocess` as `preexec_fn`. The kernel then kills the child the moment the thread that
started it ends, however it ends. libc is loaded at import, so that nothing is imported between fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def die_with_parent(sig: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """What the child runs before exec: ask for `sig` when its parent dies, and leave if it is dead already."""
    parent = os.getpid()

    def before_exec() -> None:
        if _LIBC.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:
            os._exit(1)

    return before_exec
