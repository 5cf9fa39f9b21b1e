"""The mixing kernel on the card, at the width of Kimi-K3 and at an odd one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from k3_kernels.reference import attnres as reference
from k3_kernels.triton import attnres

from tests.compare import assert_close


@pytest.mark.parametrize("tokens, candidates, width", [(256, 9, 7168), (3, 1, 100), (7, 5, 1500)])
def test_one_launch_equals_the_reference(tokens: int, candidates: int, width: int) -> None:
    """bfloat16 results differ by the last bit of their rounding: 2^-8 of numbers below 4."""
    torch.manual_seed(width)
    frame = torch.full((tokens, candidates + 3, width), float("nan"), device="cuda")
    view = frame.bfloat16()[:, :candidates]
    view.copy_(torch.randn(tokens, candidates, width, device="cuda"))
    weight = torch.randn(width, device="cuda")
    expected = reference.mix(view.double(), weight.double(), 1e-5)
    assert_close(attnres.mix(view, weight, 1e-5), expected, 2e-2, "mixture")


@pytest.mark.parametrize("n_outputs", [0, 1, 2])
@pytest.mark.parametrize("tokens, candidates, width", [(256, 9, 7168), (1, 2, 7168), (3, 1, 100)])
def test_one_pass_over_the_stream_equals_its_parts(
    tokens: int, candidates: int, width: int, n_outputs: int
) -> None:
    """The residual to the bit; the norm rounds twice, two bits of numbers below 32."""
    torch.manual_seed(width + n_outputs)
    frame = torch.full((tokens, candidates + 3, width), float("nan"), device="cuda").bfloat16()
    frame[:, :candidates] = torch.randn(tokens, candidates, width, device="cuda")
    packed = torch.randn(tokens, 48 + width, device="cuda")
    outputs = (torch.randn(tokens, width, device="cuda").bfloat16(), packed[:, 48:])[:n_outputs]
    score, norm = (torch.randn(width, device="cuda") * width**-0.5 for _ in range(2))
    norm = (1 + norm).bfloat16()
    ours, theirs = frame.clone(), frame.clone()
    got = attnres.read(ours[:, :candidates], outputs, score, norm, 1e-5)
    expected = reference.read(theirs[:, :candidates], outputs, score, norm, 1e-5)
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert_close(got, expected, 0.07, "input of a sublayer")
