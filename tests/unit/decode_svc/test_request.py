"""The table of request states."""

import pytest

from decode_svc.request import TRANSITIONS, DecodeRequest, Event, RequestSpec, State
from k3.types import RequestId, SamplingParams, StopParams

SPEC = RequestSpec(RequestId("r"), (1, 2), SamplingParams(), StopParams(3))


def request_in(state: State) -> DecodeRequest:
    ways = {
        State.QUEUED: [],
        State.ADMITTED: [Event.ADMIT],
        State.FILLING: [Event.ADMIT, Event.FILL],
        State.RUNNING: [Event.ADMIT, Event.FILL, Event.FILLED],
        State.FINISHING: [Event.ADMIT, Event.FILL, Event.FILLED, Event.FINISH],
        State.GONE: [Event.DROP],
    }
    request = DecodeRequest(1, SPEC, 0.0)
    for event in ways[state]:
        request.apply(event)
    return request


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_only_listed_events_change_a_state(state: State, event: Event) -> None:
    request = request_in(state)
    assert request.state is state
    if event in TRANSITIONS[state]:
        request.apply(event)
        assert request.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(AssertionError, match=f"{event.value}.*not allowed"):
            request.apply(event)
        assert request.state is state


def test_every_state_can_reach_the_end() -> None:
    reached = {State.GONE}
    for _ in State:
        reached |= {s for s in State if reached & set(TRANSITIONS[s].values())}
    assert reached == set(State)


def test_a_request_without_memory_says_so_when_asked_for_it() -> None:
    with pytest.raises(AssertionError, match="holds nothing"):
        _ = request_in(State.QUEUED).held
