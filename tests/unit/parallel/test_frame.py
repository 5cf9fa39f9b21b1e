"""The frame's layout, its header check, and what is captured where (golden: relay_layout)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3.errors import GroupFailed, ModelError
from k3.model.spec import K3Spec
from k3.parallel.collectives import Pending, SoloCollectives
from k3.parallel.frame import Frame, FrameLayout, frame_layout, receive_frame, send_frame

pytestmark = pytest.mark.prefill

ROOT = Path(__file__).parents[3]
NANO = K3Spec.from_folder(ROOT / "tests/golden/k3")
CPU = torch.device("cpu")


class _Sent:
    def wait(self) -> None: ...


class Wire(SoloCollectives):
    """Keeps the last message for the receiver."""

    def __init__(self) -> None:
        self.message = torch.empty(0)

    def send(self, tensor: Tensor, to: int) -> Pending:
        self.message = tensor.clone()
        return _Sent()

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        return tensor.copy_(self.message)


def _frame(n_tokens: int, layout: FrameLayout) -> Frame:
    frame = Frame.empty(layout, n_tokens, torch.float64, CPU)
    frame.data_TUH.copy_(torch.randn(frame.data_TUH.shape, dtype=torch.float64))
    return frame


@pytest.mark.parametrize("n_tokens", [1, 63])
def test_a_frame_arrives_as_it_was_sent(n_tokens: int) -> None:
    layout = frame_layout(NANO, 5, (1, 3, 8))
    frame, wire = _frame(n_tokens, layout), Wire()
    send_frame(wire, frame, 17, 1).wait()
    got = receive_frame(wire, layout, n_tokens, 17, 0, torch.float64, CPU)
    assert torch.equal(got.data_TUH, frame.data_TUH)


def test_the_frame_of_another_step_is_refused_by_name() -> None:
    layout = frame_layout(NANO, 5, ())
    frame, wire = _frame(3, layout), Wire()
    send_frame(wire, frame, 17, 1).wait()
    with pytest.raises(GroupFailed, match="step_id 17 instead of 18"):
        receive_frame(wire, layout, 3, 18, 0, torch.float64, CPU)


def test_a_frame_of_other_width_is_refused_with_both_widths() -> None:
    """Same number of bytes, one tap instead of one banked block."""
    wire = Wire()
    send_frame(wire, _frame(3, FrameLayout(64, 1, (2,))), 0, 1).wait()
    with pytest.raises(GroupFailed, match=r"FRAME_WIDTH.*bank 1 instead of 2.*taps 1 instead of 0"):
        receive_frame(wire, FrameLayout(64, 2, ()), 3, 0, 0, torch.float64, CPU)


def test_taking_over_a_frame_with_other_taps_is_refused() -> None:
    frame = Frame.empty(FrameLayout(64, 2, (1, 3)), 2, torch.float32, CPU)
    incoming = Frame.empty(FrameLayout(64, 1, (0,)), 2, torch.float32, CPU)
    with pytest.raises(GroupFailed, match="FRAME_WIDTH"):
        frame.take_over(incoming)


@pytest.mark.parametrize("taps", [(0, 0), (9,), (-2,)])
def test_tap_lists_that_make_no_sense_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="target_layer_ids"):
        frame_layout(NANO, 9, taps)


def test_an_unknown_tap_stream_is_refused() -> None:
    with pytest.raises(ModelError, match="tap_stream"):
        frame_layout(NANO, 9, (1,), "auxiliary")


def test_a_mixture_tap_is_captured_one_layer_later() -> None:
    assert frame_layout(NANO, 5, (-1, 3, 4), "prefix").taps == (-1, 3, 4)
    assert frame_layout(NANO, 5, (-1, 3, 4), "mixture").taps == (-1, 3)
    assert frame_layout(NANO, 9, (-1, 8), "mixture").taps == (-1, 8)


def test_k3_frame_between_two_stages_has_the_published_size() -> None:
    real = K3Spec.from_config(json.loads((ROOT / "docs/examples/kimi-k3-config.json").read_text()))
    layout = frame_layout(real, 47, (2, 23, 47, 71, 89))
    assert layout.units == 7
    assert layout.units * layout.hidden_size * 2 == 100_352
