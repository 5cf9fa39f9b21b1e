"""The delta rule of a prefill chunk in Triton's interpreter equals the token-by-token recurrence."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.reference import kda as reference
from k3_kernels.triton import kda_chunk
from torch import Tensor

from tests.compare import assert_close


@pytest.fixture(autouse=True)
def nan_in_new_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize(
    "tokens, heads, dim, lowest, bounded",
    [
        (1, 1, 16, -0.1, False),
        (16, 2, 32, -5.5, True),
        (35, 2, 64, -5.0, True),
        (35, 2, 16, -80.0, False),
    ],
    ids=["one token", "the lowest bound", "bounded", "the state is forgotten at once"],
)
def test_a_chunk_equals_the_recurrence(
    tokens: int, heads: int, dim: int, lowest: float, bounded: bool
) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    joint = draw(tokens, heads, 3, dim)  # q, k and v are views of one convolution's output
    joint[:, :, :2] = reference.l2_normalize(joint[:, :, :2], 1e-6)
    q, k, v = joint.unbind(2)
    g = lowest * torch.rand(tokens, heads, dim, generator=generator)
    g[tokens // 3 : tokens // 3 + 9] = lowest
    beta, state = torch.sigmoid(draw(tokens, heads)), draw(heads, dim, dim)
    before = state.clone()
    bound = lowest if bounded else None
    o, final = kda_chunk.delta(q, k, v, g, beta, state, lower_bound=bound)
    exact = (x.double() for x in (q, k, v, g, beta, state))
    expected, expected_final = reference.recurrent(*exact)
    assert_close(o, expected, 2e-5, "output")
    assert_close(final, expected_final, 2e-5, "state")
    assert torch.equal(state, before)
