"""A rank's place in the line of pipeline stages: frames in from the stage before, frames out to the one after.

A send over gloo ends when its receiver takes the message, and the next stage may still be busy with earlier steps: so
a frame is handed over without waiting, and the stage that sent it begins its next step. No more than `MAX_UNTAKEN` wait
to be taken: a stage that is further ahead gains nothing where steps are alike, and a frame of a large model is a
gigabyte (16,384 tokens of Kimi-K3 after 47 layers: 1.5).
"""

from __future__ import annotations

import time
from collections import deque

import torch

from k3.parallel.collectives import Collectives, Pending
from k3.parallel.frame import Frame, FrameLayout, receive_frame, send_frame
from k3.parallel.mesh import Place

MAX_UNTAKEN = 2


class Relay:
    """All frames of one rank, in order of the steps."""

    def __init__(
        self,
        pipeline: Collectives,
        place: Place,
        layout: FrameLayout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """layout: of the frames that come in."""
        self._pipeline = pipeline
        self._place = place
        self._layout = layout
        self._dtype, self._device = dtype, device
        self._sending: deque[Pending] = deque()
        self.waited_s = 0.0  # for the newest frame

    def receive(self, step_id: int, n_tokens: int) -> Frame | None:
        """The frame of a step, None on the first stage. Raises GroupFailed when another one comes."""
        if self._place.is_first:
            return None
        started = time.perf_counter()
        frame = receive_frame(
            self._pipeline,
            self._layout,
            n_tokens,
            step_id,
            self._place.previous,
            self._dtype,
            self._device,
        )
        self.waited_s = time.perf_counter() - started
        return frame

    def send(self, step_id: int, frame: Frame) -> None:
        """Hand a frame to the next stage; not on the last one."""
        if len(self._sending) == MAX_UNTAKEN:
            self._sending.popleft().wait()
        self._sending.append(send_frame(self._pipeline, frame, step_id, self._place.next))
