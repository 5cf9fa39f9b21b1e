"""The mixing kernel in Triton's interpreter equals the reference, on views with NaN around them."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.reference import attnres as reference
from k3_kernels.triton import attnres

from tests.compare import assert_close


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 2e-6), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize(
    "tokens, candidates, width", [(1, 1, 8), (3, 5, 96), (2, 9, 1500), (0, 2, 8)]
)
def test_one_launch_equals_the_reference(
    tokens: int, candidates: int, width: int, dtype: torch.dtype, atol: float
) -> None:
    """float16 results differ by the last bit of their rounding."""
    generator = torch.Generator().manual_seed(width)
    frame = torch.full((tokens, candidates + 2, width), float("nan"), dtype=dtype)
    view = frame[:, :candidates]
    view.copy_(torch.randn(tokens, candidates, width, generator=generator))
    weight = torch.randn(width, generator=generator)
    got = attnres.mix(view, weight, 1e-5)
    assert got.dtype == dtype
    expected = reference.mix(view.double(), weight.double(), 1e-5)
    assert_close(got, expected, atol, "mixture")


def test_a_much_larger_score_does_not_overflow() -> None:
    view = torch.full((1, 3, 16), 1.0)
    view[0, 1] = -1.0
    got = attnres.mix(view, torch.full((16,), 50.0), 1e-5)
    assert_close(got, torch.ones(1, 16), 1e-6, "the best candidates")


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.float16, 2e-2)], ids=str)
@pytest.mark.parametrize("n_outputs", [0, 1, 2])
@pytest.mark.parametrize(
    "tokens, candidates, width", [(1, 1, 8), (3, 2, 96), (2, 9, 1500), (5, 6, 40), (0, 2, 8)]
)
def test_one_pass_over_the_stream_equals_its_parts(
    tokens: int, candidates: int, width: int, n_outputs: int, dtype: torch.dtype, atol: float
) -> None:
    """The residual afterwards is the same to the bit; the second output is wide and one of several in its buffer."""
    generator = torch.Generator().manual_seed(width + n_outputs)
    frame = torch.full((tokens, candidates + 2, width), float("nan"), dtype=dtype)
    frame[:, :candidates] = torch.randn(tokens, candidates, width, generator=generator).to(dtype)
    packed = torch.full((tokens, width + 3), float("nan"))
    packed[:, 3:] = torch.randn(tokens, width, generator=generator)
    first = torch.randn(tokens, width, generator=generator).to(dtype)
    outputs = (first, packed[:, 3:])[:n_outputs]
    score = torch.randn(width, generator=generator)
    norm = torch.randn(width, generator=generator).to(dtype)
    for weight in (score, None):
        ours, theirs = frame.clone(), frame.clone()
        got = attnres.read(ours[:, :candidates], outputs, weight, norm, 1e-5)
        expected = reference.read(theirs[:, :candidates], outputs, weight, norm, 1e-5)
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
        assert_close(got, expected, atol, "input of a sublayer")
