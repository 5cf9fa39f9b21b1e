"""A drafter's kernels compile for Hopper without a GPU, in their own process: the interpreter accepts more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dspark
ROOT = Path(__file__).parents[3]
SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from k3_kernels.triton import draft_attend, draft_heads, draft_parts, draft_rows, draft_tokens, judge, tables

HALVES = ("z", "query_norm", "query_up", "latent_norm", "key_norm", "norm", "up", "pool", "x", "y")
SINGLES = ("logits", "table", "out", "frequency", "o", "lse", "part")
NUMBERS = ("amplitude", "scale", "eps")


def kind(name):
    if not name.endswith("_ptr"):
        return "fp32" if name in NUMBERS else "i32"
    name = name.removesuffix("_ptr")
    if name in ("pages", "bound"):
        return "*i32"
    return "*bf16" if name in HALVES else "*fp32" if name in SINGLES else "*i64"


def build(kernel, warps, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kind(name) for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": warps, "num_stages": 2}
    built = triton.compile(ASTSource(kernel, signature, values), GPUTarget("cuda", 90, 32), options)
    assert built.asm["cubin"]


build(judge._best, 4, BLOCK=4096)
build(judge._verdict, 1, G=8, BLOCK_G=8, BLOCK_P=64)
build(tables._derive, 1, G=8, P=16, C=2, BLOCK_G=8)
build(draft_tokens._slot, 4, ROWS=16, RANK=60, STEP=64, BLOCK_V=128)
build(draft_tokens._draft, 4, TILES=64)
ring = {"P": 16, "STEP": 2, "GAP": 1}
rows = {"C": 64, "E": 16, "BLOCK_C": 64, **ring}
build(draft_rows._write, 1, G=8, L=2, BLOCK_E=8, **rows)
tile = {"BLOCK_K": 16, "BLOCK_Q": 128, "BLOCK_N": 32, "BLOCK_E": 16, "BLOCK_V": 32, "S": 64, "PARTS": 4}
build(draft_attend._attend, 8, K=7, H=8, Q=128, N=32, V=32, **rows, **tile)
build(draft_parts._unite, 1, V=32, BLOCK_V=32, PARTS=4)
build(draft_attend._swiglu, 4, BLOCK=1024)
heads = {"H": 4, "E": 32, "P": 16, "STEP": 1, "GAP": 16}
build(draft_heads._write, 1, G=8, L=2, BLOCK_E=16, **heads)
tile = {"BLOCK_R": 16, "BLOCK_K": 16, "BLOCK_P": 16, "BLOCK_E": 32, "S": 64, "PARTS": 1}
build(draft_heads._attend, 4, K=7, M=2, **heads, **tile)
"""


def test_every_kernel_compiles_for_a_hopper_gpu(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
