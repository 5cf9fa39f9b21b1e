"""Host values to the device by one copy."""

from __future__ import annotations

import pytest
import torch

from k3.device import uploaded_together

CPU = torch.device("cpu")


def test_values_that_travel_together_arrive_as_they_were() -> None:
    values = (
        torch.tensor([3, -(1 << 62)]),
        torch.tensor([[1.5, float("nan"), -0.0]], dtype=torch.float64),
        torch.tensor([], dtype=torch.int32),
        torch.tensor([7, -1, 1 << 30], dtype=torch.int32),
        torch.tensor([True, False]),
    )
    for got, value in zip(uploaded_together(values, CPU), values, strict=True):
        assert got.dtype == value.dtype
        assert torch.equal(got.nan_to_num(9.0), value.nan_to_num(9.0))


def test_a_wider_value_behind_a_narrower_one_is_a_bug_that_shows() -> None:
    with pytest.raises(AssertionError, match="misplaced"):
        uploaded_together((torch.zeros(1, dtype=torch.int32), torch.zeros(1)[:0].double()), CPU)
