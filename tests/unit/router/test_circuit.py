"""The circuit breaker, with time as an argument."""

from __future__ import annotations

from router.fleet.circuit import FAILURE_WINDOW_S, FAILURES_TO_OPEN, OPEN_S, Circuit, CircuitState


def opened(at: float = 0.0) -> Circuit:
    circuit = Circuit()
    for _ in range(FAILURES_TO_OPEN):
        circuit.failed(at)
    return circuit


def test_failures_in_a_row_open_it_for_a_while() -> None:
    circuit = opened()
    assert not circuit.allows(OPEN_S - 0.1)
    assert circuit.state(OPEN_S) is CircuitState.HALF_OPEN


def test_a_success_in_between_starts_the_count_anew() -> None:
    circuit = Circuit()
    for _ in range(FAILURES_TO_OPEN - 1):
        circuit.failed(0.0)
    circuit.succeeded(0.0)
    circuit.failed(0.0)
    assert circuit.state(0.0) is CircuitState.CLOSED


def test_failures_spread_over_more_than_the_window_do_not_open_it() -> None:
    circuit = Circuit()
    for n in range(3 * FAILURES_TO_OPEN):
        circuit.failed(n * FAILURE_WINDOW_S / 3)
    assert circuit.state(1e9) is CircuitState.CLOSED


def test_half_open_lets_one_request_through_at_a_time_and_two_successes_close_it() -> None:
    circuit = opened()
    for _ in range(2):
        assert circuit.allows(OPEN_S)
        circuit.sent(OPEN_S)
        assert not circuit.allows(OPEN_S)
        circuit.succeeded(OPEN_S)
    assert circuit.state(OPEN_S) is CircuitState.CLOSED


def test_a_failed_probe_opens_it_again() -> None:
    circuit = opened()
    circuit.sent(OPEN_S)
    circuit.failed(OPEN_S)
    assert not circuit.allows(2 * OPEN_S - 0.1)
    assert circuit.allows(2 * OPEN_S)


def test_a_cancelled_probe_makes_room_for_the_next() -> None:
    circuit = opened()
    circuit.sent(OPEN_S)
    circuit.ended()
    assert circuit.allows(OPEN_S)
