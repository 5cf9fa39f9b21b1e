"""A prefill pipeline in virtual time: the real scheduler, and stages that take as long as they are said to.

Stages take plans in order, each as soon as it is free and the stage before is done with it; the last one acknowledges.
For `k3-bench pipeline` and for tests of what a schedule is worth. Pure. Golden: prefix/pp_timeline.json.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefill_svc.core.scheduler import Plan, PrefillScheduler

Cost = Callable[[Plan], float]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt of `prompt_len` tokens that comes at `at`, in the unit of the costs. chain: hashes of its pages."""

    key: int
    prompt_len: int
    at: float = 0.0
    chain: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Flight:
    """One plan on its way: begin and end on every stage."""

    plan: Plan
    spans: tuple[tuple[float, float], ...]

    @property
    def acknowledged_at(self) -> float:
        """When the last stage is done."""
        return self.spans[-1][1]


@dataclass(slots=True)
class Timeline:
    """What happened. By key: newest step before a prompt came, step of its first chunk, time of its end."""

    flights: list[Flight] = field(default_factory=list[Flight])
    arrived_step: dict[int, int] = field(default_factory=dict[int, int])
    first_step: dict[int, int] = field(default_factory=dict[int, int])
    done_at: dict[int, float] = field(default_factory=dict[int, float])
    max_inflight: int = 0

    @property
    def makespan(self) -> float:
        """When the last plan is acknowledged."""
        return max(flight.acknowledged_at for flight in self.flights)

    @property
    def occupancy(self) -> float:
        """Share of the stages' time until the makespan in which they compute."""
        busy = sum(end - begin for flight in self.flights for begin, end in flight.spans)
        return busy / (len(self.flights[0].spans) * self.makespan)

    def waited_steps(self, key: int) -> int:
        """Steps from a prompt's arrival to the one its first chunk was in, that one included."""
        return self.first_step[key] - self.arrived_step[key]


def run(
    scheduler: PrefillScheduler, n_stages: int, cost: Cost, arrivals: Sequence[Arrival]
) -> Timeline:
    """Compute all prompts; each is let go at once when it is done. cost: of a plan on one stage."""
    line, now = Timeline(), 0.0
    free = [0.0] * n_stages
    coming = deque(sorted(arrivals, key=lambda arrival: arrival.at))
    flying: deque[Flight] = deque()
    n_planned = 0
    while True:
        while coming and coming[0].at <= now:
            arrival = coming.popleft()
            scheduler.submit(arrival.key, arrival.prompt_len, now, chain=arrival.chain)
            line.arrived_step[arrival.key] = n_planned
        while (plan := scheduler.plan(now)) is not None:
            n_planned = plan.step_id
            flight = _fly(plan, free, now, cost(plan))
            for chunk in plan.chunks:
                line.first_step.setdefault(chunk.key, plan.step_id)
            line.flights.append(flight)
            flying.append(flight)
            line.max_inflight = max(line.max_inflight, len(flying))
        if flying and (not coming or flying[0].acknowledged_at <= coming[0].at):
            now = flying[0].acknowledged_at
            _acknowledge(scheduler, flying.popleft().plan, now, line)
        elif coming:
            now = coming[0].at
        else:
            return line


def _fly(plan: Plan, free: list[float], now: float, cost: float) -> Flight:
    """The plan through all stages; `free` is when each of them may begin with the next one."""
    spans: list[tuple[float, float]] = []
    begin = now
    for stage, free_at in enumerate(free):
        begin = max(begin, free_at)
        free[stage] = begin + cost
        spans.append((begin, free[stage]))
        begin = free[stage]
    return Flight(plan, tuple(spans))


def _acknowledge(scheduler: PrefillScheduler, plan: Plan, now: float, line: Timeline) -> None:
    finals = [(chunk.key, chunk.epoch) for chunk in plan.chunks if chunk.is_final]
    scheduler.advance(plan.step_id, finals)
    for key, _epoch in finals:
        line.done_at[key] = now
        scheduler.release(key)
