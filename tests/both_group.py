"""A decode instance that computes prompts itself, without processes: a `DecodeGroup` under the service's own steps.

Real `LocalPrefill`, real line of plans, a thread per rank. As many plans as the service allows are launched before the
oldest answer is read. Prompts beyond `local_prefill_max` come from a prefill instance, as in `DecodeGroup`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from decode_svc.caller import Caller, Tokens
from decode_svc.deployment import Deployment
from decode_svc.local_prefill import LocalPrefill
from decode_svc.rank.loop import Launched
from decode_svc.request import DecodeRequest, State
from decode_svc.steps import Steps
from k3.telemetry.metrics import DecodeMetrics
from k3.v1 import plan_pb2
from tests.decode_group import Ask, DecodeGroup, Model


class BothGroup(DecodeGroup):
    """`kinds`: of the plans, in order: c for chunks, g for groups."""

    def __init__(self, model: Model, **options: Any) -> None:
        super().__init__(model, **{"role": "both", **options})
        deployment = Deployment.of(self.config, "digest")
        prompts = deployment.prompts()
        assert prompts is not None
        self.scheduler = deployment.scheduler(prompts)
        self.metrics = DecodeMetrics()
        self.local = LocalPrefill(
            "decode-0",
            deployment.longest_local,
            self.scheduler,
            prompts,
            self.metrics,
            has_drafter=deployment.draft is not None,
        )
        self.steps = Steps(self.scheduler, self.local)
        self.callers: dict[int, Caller] = {}
        self.kinds = ""
        self._flying: deque[Launched] = deque()

    @property
    def requests(self) -> list[DecodeRequest]:
        """All that were ever asked, in order of their keys from 1."""
        return self._requests

    def submit(self, ask: Ask) -> DecodeRequest:
        """A request joins the queue."""
        request = super().submit(ask)
        self.callers[request.key] = Caller(request)
        return request

    def _admit(self) -> None:
        for request in self.scheduler.admit(0.0):
            if self.local.takes(request):
                self.local.start(self.callers[request.key], 0.0)
            else:
                self._deal(request)

    def abort(self, request: DecodeRequest) -> None:
        """The client goes away, wherever the request is."""
        if self.local.is_computing(request):
            self.local.abort(request)
        elif request.state is State.RUNNING:
            self.scheduler.abort(request)
        elif request.state is not State.FINISHING and request.state is not State.GONE:
            self.scheduler.drop(request)

    def step(self, requests: list[DecodeRequest]) -> None:
        """Let in what fits, launch what may be in flight, absorb the oldest answer."""
        self._admit()
        while (plan := self.steps.plan(0.0)) is not None:
            self.kinds += "c" if plan.chunks else "g"
            self._flying.append(self._launch(plan))
        if self._flying:
            result = self.ranks[self._answering].answer(self._flying.popleft())
            self.steps.absorb(plan_pb2.StepResult.FromString(result.SerializeToString()), 0.0)
        for i, request in enumerate(requests):
            ask = self._asked[request.key]
            if request.state is State.RUNNING and 0 < ask.leaves_after <= len(request.outputs):
                self.scheduler.abort(request)
                requests[i] = self.submit(replace(ask, leaves_after=0))

    def drain(self) -> None:
        """Until no request is open and no plan in flight."""
        while self.scheduler.open_requests() or self._flying:
            self.step([])

    def is_clean(self) -> bool:
        """Whether every page, slot and row is back, and nothing is pinned."""
        pages, rows = self.scheduler.memory.page_counts(), self.scheduler.rows.counts()
        slots = self.local.prompts.cache.slot_counts()
        held = self.scheduler.memory.slot_counts().held
        return (pages.held, pages.quarantined, rows.held, held, slots.pinned) == (0, 0, 0, 0, 0)


def heard(caller: Caller) -> list[int]:
    """Token ids that the prompt's end told a caller; what steps tell it is the incarnation's to say."""
    ids: list[int] = []
    while not caller.is_told:
        event = caller._outbox.popleft()
        ids += [token.id for token in event.tokens] if isinstance(event, Tokens) else []
    return ids
