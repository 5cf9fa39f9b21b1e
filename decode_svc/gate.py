"""Whether a service speculates at all: closed while drafts are not worth their step, opened again on trial. Pure.

The measure is the mean, over the newest `window` requests that ended, of the drafts accepted per step that had drafts.
The bar is `threshold`, or, where the cost of steps is calibrated, what the running batch needs to break even, if that
is more. A closed gate opens when a smaller batch brings the bar down far enough, or after `retry_steps` steps on trial:
the window starts empty, and the gate cannot close before it is full again. Each trial that fails doubles the wait.

A closed gate only means steps without drafts: groups of one token on the same path. Under the `match` rule tokens do
not depend on it, under the others their law does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from k3.types import Speculation

MARGIN = 1.25  # a closed gate opens for a bar that is lower than the mean by this factor
LONGEST_WAIT = 64  # times `retry_steps`


@dataclass(frozen=True, slots=True)
class GateRule:
    """window: requests that are averaged. threshold: accepted drafts per step. retry_steps: closed before a trial."""

    window: int
    threshold: float
    retry_steps: int


def no_cost(n_rows: int) -> float:
    """Without a calibration nothing is known of what steps cost."""
    del n_rows
    return 0.0


class SpeculationGate:
    """break_even: drafts that must be accepted per step for a batch of so many rows to gain from them."""

    def __init__(self, rule: GateRule, break_even: Callable[[int], float] = no_cost) -> None:
        self._rule = rule
        self._break_even = break_even
        self._newest: deque[float] = deque(maxlen=rule.window)
        self._wait = rule.retry_steps
        self._closed_for = 0
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """As of the newest decision."""
        return self._is_open

    @property
    def mean(self) -> float | None:
        """Accepted drafts per step of the newest requests; None until there are enough."""
        if len(self._newest) < self._rule.window:
            return None
        return sum(self._newest) / len(self._newest)

    def finished(self, drafts: Speculation | None) -> None:
        """A request ended; without steps that had drafts it says nothing."""
        if drafts is not None and drafts.n_steps:
            self._newest.append(drafts.n_accepted / drafts.n_steps)

    def decide(self, n_rows: int) -> bool:
        """Whether the step that is being planned, of `n_rows` rows, speculates. Call once per step."""
        mean = self.mean
        bar = max(self._rule.threshold, self._break_even(n_rows))
        if self._is_open:
            if mean is None:
                return True
            if mean < bar:
                self._is_open, self._closed_for = False, 0
            else:
                self._wait = self._rule.retry_steps
            return self._is_open
        self._closed_for += 1
        if mean is not None and mean >= bar * MARGIN:
            self._is_open = True
        elif self._closed_for >= self._wait:
            self._is_open = True
            self._newest.clear()
            self._wait = min(2 * self._wait, LONGEST_WAIT * self._rule.retry_steps)
        return self._is_open
