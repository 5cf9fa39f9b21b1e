"""Frames on their way: in order, kept alive as long as they may travel, never longer."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from k3.errors import GroupFailed
from k3.parallel.collectives import Pending, SoloCollectives
from k3.parallel.frame import Frame, FrameLayout
from k3.parallel.mesh import Mesh
from k3.parallel.relay import MAX_UNTAKEN, Relay

pytestmark = pytest.mark.prefill

CPU = torch.device("cpu")
LAYOUT = FrameLayout(8, 1, (2,))


class Line(SoloCollectives):
    """Takes messages without looking at them until it is waited for, as a busy next stage does."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.messages: list[Tensor] = []
        self.n_sent = 0

    def send(self, tensor: Tensor, to: int) -> Pending:
        self.n_sent += 1
        return _Sending(self, tensor, self.n_sent)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        return tensor.copy_(self.messages.pop(0))


class _Sending:
    def __init__(self, line: Line, tensor: Tensor, number: int) -> None:
        self.line, self.tensor, self.number = line, tensor, number

    def wait(self) -> None:
        self.line.waited.append(self.number)


def relay(line: Line, stage: int, pp: int = 3) -> Relay:
    return Relay(line, Mesh(pp).place(stage), LAYOUT, torch.float32, CPU)


def frame(n_tokens: int = 5) -> Frame:
    made = Frame.empty(LAYOUT, n_tokens, torch.float32, CPU)
    made.data_TUH.zero_()
    return made


def test_a_busy_next_stage_is_not_waited_for_until_too_many_frames_are_not_taken() -> None:
    line = Line()
    sender = relay(line, 0)
    for step in range(1, MAX_UNTAKEN + 1):
        sender.send(step, frame())
    assert line.waited == []
    sender.send(7, frame())
    sender.send(8, frame())
    assert line.waited == [1, 2]


def test_no_frame_is_kept_longer_than_it_may_take() -> None:
    """Nothing is resident: a frame is allocated by its step, and gone once later ones are on their way."""
    line = Line()
    sender = relay(line, 0)
    made = []
    for step in range(1, 7):
        sent = frame()
        made.append(weakref.ref(sent.message))
        sender.send(step, sent)
        del sent
    gc.collect()
    kept = [ref() is not None for ref in made]
    assert kept == [False] * (6 - MAX_UNTAKEN) + [True] * MAX_UNTAKEN


def test_the_first_stage_receives_nothing() -> None:
    assert relay(Line(), 0).receive(1, 5) is None


def test_a_frame_of_another_step_or_size_is_refused() -> None:
    line = Line()
    sent = frame()
    relay(line, 0).send(7, sent)
    for step, n_tokens in ((8, 5), (7, 4)):
        line.messages = [sent.message[: 64 + n_tokens * 3 * 8 * 4].clone()]
        with pytest.raises(GroupFailed, match="FRAME_WIDTH"):
            relay(line, 1).receive(step, n_tokens)
    line.messages = [sent.message.clone()]
    got = relay(line, 1).receive(7, 5)
    assert got is not None
    assert torch.equal(got.data_TUH, sent.data_TUH)
