"""Circuit breaker of one instance: closed -> open -> half open -> closed.

Five failures in a row within 60 s open it for 10 s; then one request at a time is let through, and two successes close
it. Failures are those of the instance; client errors and cancellations are not reported here. Time is an argument.
"""

from __future__ import annotations

from enum import Enum

FAILURES_TO_OPEN = 5
FAILURE_WINDOW_S = 60.0
OPEN_S = 10.0
SUCCESSES_TO_CLOSE = 2


class CircuitState(Enum):
    """Values are what operators see; the order is the metric's 0, 1, 2."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Circuit:
    """Counts outcomes of one instance."""

    def __init__(self) -> None:
        self._first_failure_at = 0.0
        self._n_failures = 0
        self._opened_at: float | None = None
        self._n_successes = 0
        self._is_probing = False

    def state(self, now: float) -> CircuitState:
        """The state at a time."""
        if self._opened_at is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now < self._opened_at + OPEN_S else CircuitState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may go to the instance."""
        match self.state(now):
            case CircuitState.CLOSED:
                return True
            case CircuitState.OPEN:
                return False
            case CircuitState.HALF_OPEN:
                return not self._is_probing

    def sent(self, now: float) -> None:
        """A request went out; in half-open state it is the one probe."""
        self._is_probing = self.state(now) is CircuitState.HALF_OPEN

    def succeeded(self, now: float) -> None:
        """The instance answered as it should."""
        self._is_probing = False
        self._n_failures = 0
        if self.state(now) is CircuitState.HALF_OPEN:
            self._n_successes += 1
            if self._n_successes >= SUCCESSES_TO_CLOSE:
                self._opened_at = None

    def failed(self, now: float) -> None:
        """The instance failed."""
        self._is_probing = False
        if self.state(now) is CircuitState.HALF_OPEN:
            self._open(now)
            return
        if self._n_failures == 0 or now - self._first_failure_at > FAILURE_WINDOW_S:
            self._first_failure_at, self._n_failures = now, 0
        self._n_failures += 1
        if self._n_failures >= FAILURES_TO_OPEN:
            self._open(now)

    def ended(self) -> None:
        """A request ended without saying anything about the instance."""
        self._is_probing = False

    def _open(self, now: float) -> None:
        self._opened_at, self._n_failures, self._n_successes = now, 0, 0
