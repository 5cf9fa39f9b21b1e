"""Plans of one life, whoever makes them, in one line: verify groups of the scheduler, chunks of prompts computed here.

What it hands out goes to every rank in that order; what comes back goes to whoever planned it. No clock, no I/O.
"""

from __future__ import annotations

from decode_svc import wire
from decode_svc.local_prefill import LocalPrefill
from decode_svc.scheduler import DecodeScheduler, Progress
from decode_svc.sequence import Kind, Sequence
from k3.v1 import plan_pb2


class Steps:
    """local: None where all prompts are computed by prefill instances."""

    def __init__(self, scheduler: DecodeScheduler, local: LocalPrefill | None) -> None:
        self._scheduler, self._local = scheduler, local
        self._sequence = Sequence()

    @property
    def n_in_flight(self) -> int:
        """Plans not acknowledged."""
        return self._sequence.n_in_flight

    def plan(self, now: float) -> plan_pb2.StepPlan | None:
        """The next plan, or None when there is nothing to do or enough is in flight."""
        for kind in self._sequence.order:
            plan = self._groups() if kind is Kind.GROUPS else self._chunks(now)
            if plan is not None:
                plan.step_id = self._sequence.number(kind, plan.step_id)
                return plan
        return None

    def _groups(self) -> plan_pb2.StepPlan | None:
        plan = self._scheduler.plan()
        return None if plan is None else wire.step_plan(plan)

    def _chunks(self, now: float) -> plan_pb2.StepPlan | None:
        return None if self._local is None else self._local.plan(now)

    def absorb(self, result: plan_pb2.StepResult, now: float) -> list[Progress] | None:
        """Take the acknowledgement of the oldest plan: what its verify groups gained, or None for chunks."""
        turn = self._sequence.answered(result.step_id)
        if turn.kind is Kind.GROUPS:
            return self._scheduler.advance(turn.step, wire.emitted(result))
        assert self._local is not None
        self._local.absorb(turn.step, result, now)
        return None
