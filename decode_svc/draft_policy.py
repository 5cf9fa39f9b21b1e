"""How many drafts the rows of a step check: none, all of them, or as many as pay. Pure.

`SpeculationGate` decides first; then, with a calibration, `draft_schedule.width` weighs what the drafts are expected to
bring against what a wider step costs. The choice is made here, in the front, and travels in the plan, so ranks cannot
disagree about it. With two steps in flight a confidence is that of drafts which are being checked while the next step
is planned; it is smoothed then, as the drafts of the step that is planned do not exist yet. A row that just started
counts as the others do in the mean until its own first group is judged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from decode_svc.draft_schedule import width
from decode_svc.gate import SpeculationGate
from decode_svc.request import DecodeRequest
from k3.calibration import Calibration, calibrated

SMOOTHING = 0.8  # weight of what was known before, for confidences of other drafts than those that are checked
MAX_SAMPLES = 5000


class Sample(NamedTuple):
    """One group: what the drafter's head said of its drafts, and how many were accepted."""

    confidence: tuple[float, ...]
    n_accepted: int


class DraftPolicy:
    """gate, calibration: None where they are not wanted. is_stale: confidences are those of earlier drafts.

    `samples`: the newest groups all of whose drafts were checked, for whoever calibrates.
    """

    def __init__(
        self,
        draft_tokens: int,
        *,
        gate: SpeculationGate | None = None,
        calibration: Calibration | None = None,
        is_stale: bool = False,
    ) -> None:
        self._draft_tokens = draft_tokens
        self._calibration = calibration
        self._is_stale = is_stale
        self.gate = gate
        self.samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def width(self, requests: Sequence[DecodeRequest]) -> int | None:
        """Drafts that each of these rows checks at most; None: nothing is proposed either. Call once per step."""
        if self.gate is not None and not self.gate.decide(len(requests)):
            return None
        if self._calibration is None:
            return self._draft_tokens
        told = [request.confidence for request in requests if request.has_drafts]
        known = [confidence for confidence in told if confidence]
        if not known:
            return self._draft_tokens  # the first groups say what drafts are worth
        usual = [fmean(column) for column in zip(*known, strict=True)]
        return width([own or usual for own in told], len(requests), self._calibration.rates)

    def heard(
        self, request: DecodeRequest, n_drafts: int, n_accepted: int, confidence: Sequence[float]
    ) -> None:
        """What became of a row's drafts, and how far the drafter trusts those it proposed for the next step."""
        if request.told and n_drafts == len(request.told):
            self.samples.append(Sample(request.told, n_accepted))
        request.told = tuple(confidence)
        if self._calibration is None or not confidence:
            return
        temperatures = self._calibration.temperatures[: len(confidence)]
        new, old = calibrated(confidence, temperatures), request.confidence
        if self._is_stale and old:
            new = [SMOOTHING * a + (1 - SMOOTHING) * b for a, b in zip(old, new, strict=True)]
        request.confidence = tuple(new)

    def finished(self, request: DecodeRequest) -> None:
        """A running request ended."""
        if self.gate is not None:
            self.gate.finished(request.drafts.total)
