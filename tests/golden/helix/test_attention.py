"""Latent attention and the merge of partial results against the helix vectors (float64, 1e-12)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from k3_kernels.reference import lse, mla
from k3_kernels.reference.tables import verify_tables
from safetensors.torch import load_file
from torch import Tensor

from tests.compare import assert_close

pytestmark = pytest.mark.helix

HERE = Path(__file__).parent
ATOL = 1e-12


@pytest.fixture(scope="module")
def g() -> dict[str, Tensor]:
    return load_file(HERE / "attn.safetensors")


def _tables(g: dict[str, Tensor], rank: int) -> tuple[Tensor, Tensor, Tensor]:
    valid = torch.ones(3, int(g["draft_len"]) + 1, dtype=torch.bool)
    return verify_tables(
        g["base"], g["block_table"], valid, int(g["page_tokens"]), int(g["cp_size"]), rank
    )


def _attend(g: dict[str, Tensor], rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Write the owned rows, then attend within the bounds: pool after, o, lse."""
    _, slot, bound = _tables(g, rank)
    pool = g["pool_before"][rank].clone()
    mla.write(pool, slot, g["new_kv"])
    page_tokens, group = int(g["page_tokens"]), int(g["draft_len"]) + 1
    plan = mla.plan_decode(g["block_table"], bound, group, int(bound.max()), page_tokens)
    o, log_sum = mla.decode(g["q"], pool, plan, float(g["scale"]), 16)
    return pool, o, log_sum


@pytest.mark.parametrize("rank", range(4))
def test_tables_give_the_golden_slots_and_bounds(g: dict[str, Tensor], rank: int) -> None:
    position, slot, bound = _tables(g, rank)
    assert torch.equal(position, g["positions"].long())
    assert torch.equal(slot, g["pool_slot"][rank].long())
    assert torch.equal(bound, g["kv_bound"][rank])


@pytest.mark.parametrize("rank", range(4))
def test_each_rank_gives_the_golden_partials(g: dict[str, Tensor], rank: int) -> None:
    pool, o, log_sum = _attend(g, rank)
    assert_close(pool, g["pool_after"][rank], 0, "pool")
    assert_close(o, g["partial_o"][rank], ATOL, "o")
    assert_close(log_sum, g["partial_lse"][rank], ATOL, "lse")


def test_merged_partials_equal_unsharded_attention(g: dict[str, Tensor]) -> None:
    partials = [_attend(g, rank) for rank in range(4)]
    o, log_sum = lse.merge(
        torch.stack([p[1] for p in partials]), torch.stack([p[2] for p in partials])
    )
    for reference in ("combined", "unsharded"):
        assert_close(o, g[f"{reference}_o"], ATOL, f"{reference} o")
        assert_close(log_sum, g[f"{reference}_lse"], ATOL, f"{reference} lse")


def test_poison_in_rows_without_keys_does_not_reach_the_merge(g: dict[str, Tensor]) -> None:
    o, log_sum = g["partial_o"].clone(), g["partial_lse"]
    empty = log_sum == float("-inf")
    assert bool(empty.any()), "the golden step has ranks without keys"
    o[empty] = float("nan")
    assert_close(lse.merge(o, log_sum)[0], g["combined_o"], ATOL, "o")


def test_head_slices_give_the_golden_output_projection(g: dict[str, Tensor]) -> None:
    value = torch.einsum("thc,hvc->thv", g["combined_o"], g["w_uv"]).flatten(1)
    assert_close((value * g["gate"]) @ g["w_o"].t(), g["y"], ATOL, "y")


def _numbers(values: object) -> Tensor:
    def convert(x: object) -> object:
        if isinstance(x, list):
            return [convert(item) for item in x]
        return float(x)  # type: ignore[arg-type]

    return torch.tensor(convert(values), dtype=torch.float64)


@pytest.mark.parametrize("which", range(len(json.loads((HERE / "combine.json").read_text()))))
def test_merge_gives_the_golden_combinations(which: int) -> None:
    group = json.loads((HERE / "combine.json").read_text())[which]
    for i, case in enumerate(group["cases"]):
        o, log_sum = _numbers(case["partial_o"]), _numbers(case["partial_lse"])
        got_o, got_lse = lse.merge(o[:, None, None], log_sum[:, None, None])
        what = f"{group['ranks']} ranks, case {i}"
        assert_close(got_o[0, 0], _numbers(case["combined_o"]), ATOL, what)
        assert_close(got_lse[0, 0], _numbers(case["combined_lse"]), ATOL, what)
