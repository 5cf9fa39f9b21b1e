"""Our kernels on small odd shapes under compute-sanitizer: no access outside a tensor, no result that is wrong.

    python benchmarks/sanitize.py [--tool memcheck]

The shapes are those of `tests/gpu`, with its checks. Every tensor gets memory of its own, so that the tool sees where
it ends. Exit status 0: nothing was found and every test passed; the kernels that ran are listed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SELECTED = {
    "attnres": "3-1-100 or 1-2-7168",
    "chunk": "small or 70-3-32",
    "draft": "12345-bfloat16 or 3-333-5 or torch_does[333]",
    "draw": "definition and 2.0 and bfloat16",
    "kda": "bfloat16 and (room or softplus or strong or few) or many_heads and (room or softplus)",
    "mla": "(hopper or triton or flashmla) and (border or between) and 12 or hopper and uneven and 96 or eight_ranks",
    "moe": "5-15-70 or 37-48-300 or 1-4-0-4 and bf16",
    "norm": "5-70 or 3-5-48 or 3-100",
}


def _others() -> None:
    """Kernels that no test of that folder asks for: a message of partial results, and rows written by slot."""
    import torch
    from k3_kernels.triton.mla_ops import TritonAttention

    ops = TritonAttention(132)
    o = torch.randn(5, 3, 48, device="cuda").bfloat16()
    lse, up = torch.randn(5, 3, device="cuda"), torch.randn(3, 48, 20, device="cuda").bfloat16()
    message = ops.pack(o, lse, up)
    merged = ops.merge_packed(torch.cat((message, message)), torch.bfloat16)
    expected = torch.einsum("thc,hcv->thv", o.double(), up.double())
    error = float((merged.double() - expected).norm() / expected.norm())
    assert error < 0.01, f"message: relative error {error:.4f}"
    cache = torch.zeros(3, 7, 50, device="cuda").bfloat16()
    rows = torch.randn(4, 50, device="cuda").bfloat16()
    ops.write(cache, torch.tensor([20, -1, 0, 9], device="cuda"), rows)
    assert torch.equal(cache.flatten(0, 1)[[20, 0, 9]], rows[[0, 2, 3]])


def _run() -> int:
    """The calls themselves, in the process that is watched."""
    import pytest
    from triton import knobs

    launched: set[str] = set()
    knobs.runtime.launch_enter_hook.add(lambda about: launched.add(about.get()["name"]))
    _others()
    status = 0
    for name, which in SELECTED.items():
        arguments = [f"tests/gpu/test_{name}.py", "-k", which, "-q", "-p", "no:cacheprovider"]
        status = int(pytest.main(arguments)) or status
    print(f"{len(launched)} kernels: {', '.join(sorted(launched))}", flush=True)
    return status


def main() -> None:
    """Start this script again under the tool; with --run, be what it watches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", default="memcheck")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        raise SystemExit(_run())
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    tool = ["compute-sanitizer", "--tool", arguments.tool, "--error-exitcode", "9"]
    child = [sys.executable, str(Path(__file__).resolve()), "--run"]
    raise SystemExit(subprocess.run([*tool, *child], env=environment, cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
