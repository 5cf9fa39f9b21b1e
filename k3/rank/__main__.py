"""`python -m k3.rank`: the process around `k3.rank.main`, quick to start, never slowed by its imports, quick to end.

Importing the libraries makes several hundred thousand objects that live as long as the process. The cycle collector
would walk over them again and again while they are made, and later in the middle of steps; so it is off while they are
made and is then told to leave them alone. At the end the process goes at once instead of taking them apart one by one.
"""

from __future__ import annotations

import gc
import logging
import os
import sys


def run() -> int:
    """Run the rank; returns its exit code."""
    gc.disable()
    from k3.rank.main import main

    gc.freeze()
    gc.enable()
    return main()


if __name__ == "__main__":
    code = run()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
