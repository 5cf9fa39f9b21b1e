"""The Hopper attention kernels compile without a GPU, in their own process; the interpreter does not know them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LARGEST_SHARED = 232_448  # bytes a block of a Hopper GPU may have
SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from k3_kernels.triton import mla_hopper, mla_wide

TYPES = dict.fromkeys(["q", "cache", "o"], "*bf16") | {"scale": "fp32"}
TYPES |= dict.fromkeys(["page_table", "bound", "line", "length"], "*i32")
TYPES |= dict.fromkeys(["lse", "part_o", "part_lse"], "*fp32")


def tiles(rows, columns):
    layout = "swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, fp4_padded=False, cga_layout=[]"
    return f"tensordesc<bf16[{rows}, {columns}],NVMMASharedLayout({layout})>"


def build(kernel, warps, descriptors, **constants):
    signature, values, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        types = TYPES | descriptors
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if name in constants:
            values[(i,)] = constants[name]
        elif signature[name][0] == "*" or name == "page_stride":
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, values, aligned)
    built = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps})
    assert built.asm["cubin"]
    print(built.metadata.shared)


shape = {"G": 1, "P": 64, "R": 64, "BLOCK_B": 8, "N": 64, "FEWEST": 2}
if sys.argv[1] == "wide":
    names = ("latents", "shareds", "q_latents", "q_shareds")
    blocks = dict(zip(names, (tiles(64, 256), tiles(64, 64)) * 2))
    registers = dict(zip(("FOR_PRODUCTS", "FOR_COPIES"), mla_wide.REGISTERS))
    build(mla_wide.attend_wide, 4, blocks, H=96, D=256, M=64, **registers, **shape)
else:
    queries = int(sys.argv[1])
    blocks = {"latents": tiles(64, 512), "shareds": tiles(64, 64)}
    first = {"KEYS_FIRST": queries < 64}
    build(mla_hopper.attend_hopper, 8, blocks, H=queries, C=512, M=queries, UNIT=64, W=8, **first, **shape)
"""


@pytest.mark.parametrize("kernel", ["wide", "16", "32"])
def test_it_compiles_and_its_shared_memory_fits(kernel: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", SCRIPT, kernel]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) <= LARGEST_SHARED
