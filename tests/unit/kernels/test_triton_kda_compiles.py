"""Kernels of everything but latent attention and drafts compile for Hopper without a GPU, in their own process.

The interpreter accepts more than a compiler, and it never comes to what is only done for bfloat16.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from k3_kernels.triton import attnres, draw, kda_chunk, kda_decode, kda_each, kda_tokens, kda_verify
from k3_kernels.triton import mla_message, mla_prefill, moe, norm, route

TYPES = dict.fromkeys(["u_ptr", "raw_ptr", "beta_ptr", "windows_ptr", "tails_ptr", "past_ptr"], "*bf16")
TYPES |= dict.fromkeys(["slots_ptr", "read_column_ptr"], "*i64")
TYPES |= dict.fromkeys(["lower_bound", "eps", "scale", "beta", "linear_beta"], "fp32")
TYPES |= dict.fromkeys(["x_ptr", "z_ptr", "active_ptr", "y_ptr", "kv_ptr", "shared_ptr"], "*bf16")
TYPES |= dict.fromkeys(["w13_ptr", "w2_ptr", "counts_ptr", "pairs_ptr"], "*i32") | {"scale_ptr": "*i32"}


def build(kernel, warps, **constants):
    signature, values = {}, {}
    for i, name in enumerate(kernel.arg_names):
        plain = "*fp32" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else TYPES.get(name, plain)
        if name in constants:
            values[(i,)] = constants[name]
    options = {"num_warps": warps, "num_stages": 1}
    built = triton.compile(ASTSource(kernel, signature, values), GPUTarget("cuda", 90, 32), options)
    assert built.asm["cubin"]


sizes = {"D": 64, "G": 2, "N": 2, "R": 16, "FLOATS": 13 * 64 + 256, "CHANNELS": 32}
gate = {"W": 4, "BOUNDED": True}
build(kda_decode._decode, 4, D=64, ROWS=16, FETCH=True, **gate)
build(kda_verify._apply, 4, ROWS=64, PDL=True, **sizes)
build(kda_each.prepare_each, 1, TAIL=1, FACTORED=True, **gate, **sizes)
build(kda_tokens.prepare_tile, 4, TAIL=1, FACTORED=True, COLUMNS=4, HOPPER=True, **gate, **sizes)
chunk = {"D": 32, "BLOCK": 16, "FLOATS": kda_chunk._floats(32)}
build(kda_chunk._prepare, 1, CHANNELS=32, FACTORED=True, **chunk)
build(kda_chunk._scan, 4, ROWS=16, STAGES=2, **chunk)
tile = {"E": 4, "ROWS": 64, "TOKENS": 16, "WIDTH": 128, "PACKED": True, "EVEN": True, "STAGES": 2}
build(moe._inner, 4, CLIPPED=True, **tile)
build(route._logits, 4, TOKENS=16, EXPERTS=64, WIDTH=32, STAGES=2)
heads = {"N": 32, "R": 16, "V": 32, "BLOCK_N": 32, "BLOCK_R": 16, "BLOCK_V": 32}
TYPES["q_ptr"] = "*bf16"
build(mla_prefill._attend, 4, TOKENS=64, KEYS=32, STAGES=2, **heads)
TYPES |= dict.fromkeys(["v_ptr", "output_ptr", "norm_ptr", "weight_ptr", "o", "up", "to_o"], "*bf16")
TYPES |= dict.fromkeys(["lse", "to_lse"], "*fp32")
for outputs, blocks in ((0, 0), (1, 1), (2, 4)):
    build(attnres._read, 8, OUTPUTS=outputs, BLOCKS=blocks, CHANNELS=512, WIDTH=2048)
build(norm._rms_norm, 4, ROWS=2, WIDTH=1024, GATED=False)
TYPES |= {"scores_ptr": "*bf16", "reals_ptr": "*fp64", "ids_ptr": "*i32"}
TYPES |= dict.fromkeys(["whole_ptr", "position_ptr", "drawn_ptr"], "*i64")
for limited in (False, True):
    build(draw._draw, 16, G=2, LIMITED=limited, BLOCK=4096)
shape = {"H": 4, "J": 2, "C": 64, "V": 32, "BLOCK_T": 16, "BLOCK_C": 64, "BLOCK_V": 32}
build(mla_message._project, 4, **shape)
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
