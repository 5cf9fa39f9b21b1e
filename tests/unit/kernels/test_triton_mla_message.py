"""Messages between context ranks: the fused launches against the reference, byte for byte where nothing is computed."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.reference import message as reference
from k3_kernels.triton import mla_message

from tests.compare import assert_close
from tests.latent_steps import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")


@pytest.mark.parametrize("tokens", [1, 17, 65])
@pytest.mark.parametrize("messages", [1, 2, 6])
def test_projected_messages_equal_the_reference(tokens: int, messages: int) -> None:
    torch.manual_seed(tokens)
    o, lse = torch.randn(tokens, 6, 24), torch.randn(tokens, 6)
    up = torch.randn(6, 20 + 6, 24)[:, 6:].transpose(1, 2)  # as the model slices it
    lse[0, 1] = float("-inf")
    got = mla_message.pack(*(x.to(DEVICE) for x in (o, lse, up)), messages).cpu()
    expected = reference.pack(o, lse, up, messages)
    assert got.shape == expected.shape == (messages, tokens, 6 // messages, 20 * 4 + 4)
    assert got.is_contiguous(), "a message is sent as it lies"
    assert torch.equal(got[..., -4:], expected[..., -4:])
    assert_close(
        got.view(torch.float32)[..., :-1], expected.view(torch.float32)[..., :-1], 1e-5, "o"
    )


def test_messages_are_merged_where_they_arrived() -> None:
    torch.manual_seed(5)
    o, lse = torch.randn(4, 7, 6, 20), torch.randn(4, 7, 6)
    lse[2, 3] = float("-inf")
    o[2, 3] = float("nan")
    sent = torch.cat([reference.pack(o[r], lse[r], None) for r in range(4)])
    by_rank = sent.unflatten(2, (2, 3))[:, :, 1]  # a strided half of the heads
    got = mla_message.merge_packed(by_rank.to(DEVICE), torch.float32).cpu()
    assert_close(got, reference.merge_packed(by_rank, torch.float32), 1e-6, "o")


def test_a_message_that_cannot_be_viewed_is_refused() -> None:
    odd = torch.zeros(1, 1, 1, 3 * 2 + 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiple of 4"):
        mla_message.merge_packed(odd, torch.float16)
