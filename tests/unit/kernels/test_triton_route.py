"""The router's choice among equal scores, its forms of a gate, and that it compiles for Hopper without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from k3_kernels.api import ReferenceMoe
from k3_kernels.layers import gate
from k3_kernels.reference.moe import Routing
from k3_kernels.triton import route
from k3_kernels.triton.moe_ops import TritonMoe

ROOT = Path(__file__).parents[3]
SCRIPT = """
import itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from k3_kernels.triton import route
from k3_kernels.triton.moe_ops import TritonMoe

KINDS = {"ids_ptr": "*i64", "scaling": "fp32"}


def build(kernel, x="", gate="", **constants):
    names, kinds = kernel.arg_names, KINDS | {"x_ptr": x, "gate_ptr": gate}
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "*fp32" if name.endswith("_ptr") else "i32")
        for name in names
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    built = triton.compile(ASTSource(kernel, signature, values), GPUTarget("cuda", 90, 32), {"num_warps": 4})
    assert built.asm["cubin"]


for x, gate in itertools.product(("*fp32", "*bf16"), repeat=2):
    for tokens, even in ((32, True), (128, False)):
        tile = {"TOKENS": tokens, "EXPERTS": 64, "WIDTH": 64, "STAGES": 5 if even else 3, "EVEN": even}
        build(route._logits, x, gate, **tile)
kind = {"SIGMOID": True, "RENORMALIZE": True}
build(route._choose, PIECES=14, GROUPS=1, SIZE=1024, K=16, LIMITED=False, **kind)
build(route._choose, PIECES=1, GROUPS=8, SIZE=32, K=8, LIMITED=True, **kind)
"""


def test_the_router_compiles_for_a_hopper_gpu(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "kernels"), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("n_experts, top_k", [(896, 16), (130, 5), (16, 16), (3, 1)])
def test_equal_scores_are_chosen_in_the_order_of_their_ids(n_experts: int, top_k: int) -> None:
    """The best first; scores are the bias alone, of three values."""
    random = torch.Generator().manual_seed(n_experts)
    bias = torch.randint(-1, 2, (n_experts,), generator=random).float()
    rule = Routing(top_k, "sigmoid", True, 1.0)
    ids, weight = route.route(torch.ones(2, 8), torch.zeros(n_experts, 8), bias, rule)
    expected = bias.sort(descending=True, stable=True).indices[:top_k]
    assert torch.equal(ids, expected.expand(2, -1))
    expected_weight = 1.0 if top_k > 1 else 0.5
    assert torch.allclose(weight.sum(1), torch.full((2,), expected_weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_in_bfloat16_is_the_same_gate(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(5, 130, generator=random).to(dtype)
    gate, bias = (
        torch.randn(20, 130, generator=random).bfloat16(),
        torch.randn(20, generator=random),
    )
    rule = Routing(4, "sigmoid", True, 2.5)
    for got, wanted in zip(
        route.route(x, gate, bias, rule), route.route(x, gate.float(), bias, rule), strict=True
    ):
        assert torch.equal(got, wanted)


def test_a_gate_is_narrowed_where_no_digit_is_lost() -> None:
    exact = torch.randn(6, 9, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    narrow = gate(TritonMoe(1), exact)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow.float(), exact)
    assert gate(TritonMoe(1), exact / 3).dtype == torch.float32
    assert gate(ReferenceMoe(), exact).dtype == torch.float32
