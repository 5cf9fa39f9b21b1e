"""The Triton attention against the reference: odd sizes, NaN in everything unwritten, groups over page borders.

Run on CPU in Triton's interpreter (float32 and float16; it is wrong for bfloat16), on a GPU compiled.
"""

from __future__ import annotations

import math

import pytest
import torch
from k3_kernels.reference import lse as reference_lse
from k3_kernels.reference import mla as reference
from k3_kernels.triton.combine import merge
from k3_kernels.triton.mla_ops import Blocks, TritonAttention

from tests.compare import assert_close
from tests.latent_steps import DEVICE, SHAPES, Case, step

# log(0) = -inf is the answer for queries without keys; only the interpreter's numpy minds
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")

QUERIES_FIRST = Blocks(16, 32, False, warps=4, stages=2)
KEYS_FIRST = Blocks(16, 64, True, warps=4, stages=2, at_once=2)


def check(case: Case, ops: TritonAttention, atol: float, latent: int = 32) -> None:
    """Output and natural-log lse equal the float64 reference."""
    scale = 1 / math.sqrt(case.q_THK.shape[-1])
    o, lse = case.triton(ops, scale, latent)
    expected_o, expected_lse = case.reference(scale, latent)
    assert lse.dtype == torch.float32
    assert_close(o.cpu(), expected_o.cpu(), atol, "o")
    assert_close(lse.cpu(), expected_lse.cpu(), atol, "lse")


@pytest.mark.parametrize("blocks", [QUERIES_FIRST, KEYS_FIRST], ids=["queries", "keys"])
@pytest.mark.parametrize("bounds", SHAPES.values(), ids=SHAPES)
def test_attention_equals_the_reference(bounds: list[list[int]], blocks: Blocks) -> None:
    check(step(bounds, heads=5), TritonAttention(6, blocks), 2e-6)


@pytest.mark.parametrize("n_sms", [1, 2, 3, 11])
def test_any_number_of_pieces_gives_the_same_answer(n_sms: int) -> None:
    case = step([[200, 201], [0, 0], [64, 65], [129, 130]], heads=3)
    check(case, TritonAttention(n_sms, Blocks(16, 64, True, 4, 2, fewest=1, at_once=2)), 2e-6)


@pytest.mark.parametrize("page_tokens", [4, 16, 128])
def test_pages_shorter_and_longer_than_a_tile(page_tokens: int) -> None:
    case = step([[3, 4, 5], [131, 132, 133]], heads=4, page_tokens=page_tokens)
    check(case, TritonAttention(4, QUERIES_FIRST), 2e-6)


def test_widths_that_are_no_powers_of_two_are_padded_inside() -> None:
    case = step([[37, 38]], heads=3, latent=24, shared=8)
    check(case, TritonAttention(2, KEYS_FIRST), 2e-6, latent=24)


def test_float16_stays_within_its_rounding() -> None:
    case = step([[90, 91, 92]], heads=6, dtype=torch.float16)
    check(case, TritonAttention(3, QUERIES_FIRST), 2e-3)  # p and o are rounded to 11 bits


def test_two_runs_are_bitwise_equal() -> None:
    case = step([[200, 201], [70, 71]], heads=3)
    ops = TritonAttention(7, KEYS_FIRST)
    first, second = case.triton(ops, 0.2, 32), case.triton(ops, 0.2, 32)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_cache_of_another_dtype_is_refused_with_the_remedy() -> None:
    case = step([[3]], heads=2)
    ops = TritonAttention(1)
    plan = ops.plan(case.table_BW, case.bound_T, 1, 3, 64)
    with pytest.raises(TypeError, match=r"backends\.attention=reference"):
        ops.decode(case.q_THK.double(), case.cache_PTK, plan, 1.0, 32)


def test_rows_are_written_by_slot_and_minus_one_is_skipped() -> None:
    case = step([[1]], heads=1, page_tokens=4)
    latent = torch.randn(3, 48).to(DEVICE)
    before = case.cache_PTK.clone()
    slots = torch.tensor([5, -1, 2]).to(DEVICE)
    TritonAttention(1).write(case.cache_PTK, slots, latent)
    reference.write(before, slots, latent)
    assert_close(case.cache_PTK.cpu(), before.cpu(), 0.0, "cache")


@pytest.mark.parametrize("queries", [1, 2])
def test_merge_ignores_whatever_an_empty_partial_holds(queries: int) -> None:
    torch.manual_seed(1)
    o, lse = torch.randn(3, 5, 7, 20), torch.randn(3, 5, 7)
    for poison, at in ((float("nan"), 0), (3e38, 1)):
        lse[at, :2] = float("-inf")
        o[at, :2] = poison
    lse[:, 4] = float("-inf")
    got_o, got_lse = merge(o.to(DEVICE), lse.to(DEVICE), queries)
    expected_o, expected_lse = reference_lse.merge(o, lse)
    assert_close(got_o.cpu(), expected_o, 1e-6, "o")
    assert_close(got_lse.cpu(), expected_lse, 1e-6, "lse")


def test_merge_reads_views_of_a_packed_message() -> None:
    torch.manual_seed(2)
    o, lse = torch.randn(4, 3, 2, 6), torch.randn(4, 3, 2)
    message = torch.cat((o, lse.unsqueeze(-1)), -1).to(DEVICE)
    got_o, got_lse = merge(message[..., :6], message[..., 6])
    expected_o, expected_lse = reference_lse.merge(o, lse)
    assert_close(got_o.cpu(), expected_o, 1e-6, "o")
    assert_close(got_lse.cpu(), expected_lse, 1e-6, "lse")
