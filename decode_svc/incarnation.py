"""One life of the rank group: everything that is lost with it, and the loops that keep it busy.

The scheduler says what to run, the intake fills what was admitted, the ranks compute; this file carries messages
between them and keeps `depth` plans in flight. All of it runs in one asyncio loop, so nothing here needs a lock. `run`
returns when asked to, and raises GroupFailed when a rank is lost; the driver decides what happens then.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection

from decode_svc.caller import Caller
from decode_svc.deployment import Deployment
from decode_svc.intake.filling import Identity, IntakeConfig
from decode_svc.intake.intake import Intake
from decode_svc.intake.source import PrefillSource
from decode_svc.local_prefill import LocalPrefill
from decode_svc.request import RequestSpec, State
from decode_svc.steps import Steps
from k3.errors import K3Error
from k3.rank.lives import Ranks
from k3.telemetry.metrics import DecodeMetrics
from k3.v1 import instance_pb2, plan_pb2, prefill_pb2
from prefill_svc.cache_log import CacheLog
from prefill_svc.core.cache_events import unheard

log = logging.getLogger("k3.decode")

TICK_S = 0.25
SETTLE_POLL_S = 0.02

Introduction = Callable[[], prefill_pb2.ConnectRequest]
MakeSource = Callable[[Introduction], PrefillSource]


class Incarnation:
    """movers: the ranks' agents in flat order. make_source: prefill instances, given how we introduce ourselves.

    `on_change` is called whenever the load snapshot changes.
    """

    def __init__(
        self,
        deployment: Deployment,
        instance_id: str,
        movers: list[plan_pb2.MoverReady],
        ranks: Ranks,
        make_source: MakeSource,
        metrics: DecodeMetrics,
        on_change: Callable[[], None],
    ) -> None:
        self.instance_id = instance_id
        self.cache_log = CacheLog(instance_id, self._cached) if deployment.has_cache else None
        prompts = deployment.prompts(self.cache_log.hear if self.cache_log else unheard)
        self.scheduler = deployment.scheduler(prompts)
        self.local = None
        if prompts is not None:
            self.local = LocalPrefill(
                instance_id,
                deployment.longest_local,
                self.scheduler,
                prompts,
                metrics,
                has_drafter=deployment.draft is not None,
            )
        self._steps = Steps(self.scheduler, self.local)
        self._deployment = deployment
        self._movers = list(movers)
        self._ranks = ranks
        self._metrics = metrics
        self._on_change = on_change
        self._callers: dict[int, Caller] = {}
        self._fenced: dict[int, int] = {}
        self._may_plan = asyncio.Event()
        self._has_plan = asyncio.Event()  # set while one is in flight
        self._may_admit = asyncio.Event()
        self._stop = asyncio.Event()
        self._last_result_at = _now()
        config = deployment.config
        self.intake = Intake(
            Identity(
                instance_id,
                deployment.layout_fingerprint,
                deployment.draft_fingerprint,
                deployment.n_ranks,
            ),
            IntakeConfig(config.transfer, config.serve.prefills),
            self.scheduler,
            make_source(self._introduction),
            command=ranks.command,
            senders=deployment.senders,
            draft_senders=deployment.draft_senders,
            changed=self._changed,
            metrics=metrics,
            rng=random.Random(),
        )

    def _introduction(self) -> prefill_pb2.ConnectRequest:
        return self._deployment.introduction(self.instance_id, self._movers)

    # ---------------------------------------------------------------- requests

    def open(self, spec: RequestSpec) -> Caller:
        """Take a request. Raises RequestRejected or QueueFull."""
        caller = Caller(self.scheduler.submit(spec, _now()))
        self._callers[caller.request.key] = caller
        self._changed()
        return caller

    def close(self, caller: Caller, reason: prefill_pb2.AbortReason) -> None:
        """The caller is served or gone; `reason` says why if the request is not over. Idempotent."""
        request = caller.request
        if self._callers.pop(request.key, None) is None:
            return
        self._end(caller, reason)
        self._log(caller)
        self._changed()

    def _end(self, caller: Caller, reason: prefill_pb2.AbortReason) -> None:
        if self.local is not None and self.local.is_computing(caller.request):
            self.local.abort(caller.request)
            return
        match caller.request.state:
            case State.QUEUED | State.ADMITTED | State.FILLING:
                self.intake.abort(caller.request, reason)
            case State.RUNNING:
                self.scheduler.abort(caller.request)
            case State.FINISHING | State.GONE:
                pass

    def fail(self, error: K3Error) -> None:
        """End every request with `error`; their memory takes its regular way."""
        for caller in tuple(self._callers.values()):
            caller.fail(error)
            self._end(caller, prefill_pb2.ABORT_REASON_REVOKED)
        self._changed()

    def abort_all(self, error: K3Error) -> None:
        """End every request with `error`; their memory takes its regular way."""
        self.fail(error)

    async def settled(self) -> None:
        """Wait until no caller, request or quarantined memory is left."""
        while self.n_busy:  # noqa: ASYNC110  (many owners, no one event)
            await asyncio.sleep(SETTLE_POLL_S)

    @property
    def n_open(self) -> int:
        """Callers not served yet."""
        return len(self._callers)

    @property
    def n_busy(self) -> int:
        """Callers, requests and quarantined memory that are not finished with."""
        n_late = 0 if self.local is None else self.local.n_late
        return (
            len(self._callers) + len(self.scheduler.open_requests()) + self.intake.n_open + n_late
        )

    # ---------------------------------------------------------------- loops

    async def run(self) -> None:
        """Work until `stop`. Raises GroupFailed when the ranks are lost."""
        loops = (self._plan, self._hear, self._admit, self._listen, self._tick)
        tasks = [asyncio.create_task(loop(), name=f"decode {loop.__name__}") for loop in loops]
        stop = asyncio.create_task(self._stop.wait(), name="decode stop")
        try:
            await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
                    raise AssertionError(f"loop {task.get_name()} returned")
        finally:
            for task in (stop, *tasks):
                task.cancel()
            await asyncio.gather(stop, *tasks, return_exceptions=True)
            await self.intake.close()

    def stop(self) -> None:
        """Let `run` return."""
        self._stop.set()

    async def _plan(self) -> None:
        """Keep the ranks busy: whenever something changed, plan as much as may be in flight."""
        steps, gate = self._steps, self.scheduler.policy.gate
        while True:
            await self._may_plan.wait()
            self._may_plan.clear()
            while (plan := steps.plan(_now())) is not None:
                if steps.n_in_flight == 1:
                    self._last_result_at = _now()
                if gate is not None:
                    self._metrics.spec.gate(gate.is_open)
                self._has_plan.set()
                await self._ranks.send_plan(plan)

    async def _hear(self) -> None:
        """Acknowledgements, one per plan and in order."""
        while True:
            await self._has_plan.wait()
            result = await self._ranks.next_result()
            self._may_plan.set()  # first, so that the next plan leaves before tokens do
            self._absorb(result)
            if self._steps.n_in_flight == 0:
                self._has_plan.clear()

    def _absorb(self, result: plan_pb2.StepResult) -> None:
        now = self._last_result_at = _now()
        progress = self._steps.absorb(result, now)
        if progress is None:
            self._changed()  # a prompt may be complete, or over
            return
        n_tokens = 0
        for request, kept in progress:
            n_tokens += len(kept.tokens)
            self._metrics.spec.observe(request.bootstrap, *request.drafts.newest)
            caller = self._callers.get(request.key)
            if caller is not None:
                caller.tell(kept, now)
        metrics = self._metrics
        metrics.step_s.observe(result.step_s)
        metrics.forward_s.observe(result.forward_s)
        metrics.batch_size.observe(len(result.rows))
        n_group = len(result.rows) * self.scheduler.limits.group_len
        metrics.exchanged_bytes.inc(n_group * self._deployment.exchange_bytes)
        metrics.tokens.inc(n_tokens)
        if len(progress) < len(result.rows) or any(kept.finish for _request, kept in progress):
            self._changed()  # memory was released

    async def _admit(self) -> None:
        """Let requests in as memory allows; the first ones that must wait may be computed early."""
        n_early = self._deployment.config.schedule.max_early_prefills
        while True:
            await self._may_admit.wait()
            self._may_admit.clear()
            for request in self.scheduler.admit(_now()):
                caller = self._callers.get(request.key)
                if caller is None:
                    self.intake.abort(request, prefill_pb2.ABORT_REASON_CLIENT)
                    continue
                caller.admitted()
                self._fill(caller)
            for request in self.scheduler.head(n_early):
                if self.local is not None and self.local.takes(request):
                    continue
                if not self.intake.is_filling(request) and request.key in self._callers:
                    self.intake.start(self._callers[request.key])
            self._on_change()

    def _fill(self, caller: Caller) -> None:
        """Have the prompt of an admitted request computed, here or by a prefill instance."""
        if self.local is None or not self.local.takes(caller.request):
            self.intake.start(caller)
            return
        self.local.start(caller, _now())
        self._may_plan.set()

    async def _listen(self) -> None:
        while True:
            rank, status = await self._ranks.next_status()
            match status.WhichOneof("status"):
                case "ready":
                    self._movers[rank] = status.ready
                case "heartbeat":
                    self._count_fenced(rank, status.heartbeat.fenced_records)
                case _:
                    pass
            self.intake.on_status(rank, status)

    def _count_fenced(self, rank: int, total: int) -> None:
        """Movers count records they dropped since their start."""
        before = self._fenced.get(rank, 0)
        self._metrics.transfer.fenced_writes.inc(max(0, total - before))
        self._fenced[rank] = total

    async def _tick(self) -> None:
        """What no event announces: bugs in tasks, and quarantine that has grown too far."""
        cap = self._deployment.config.transfer.quarantine_cap
        while True:
            await asyncio.sleep(TICK_S)
            if self.intake.crash is not None:
                raise self.intake.crash
            if self.intake.needs_fence(cap):
                await self.intake.fence()

    def flush_cache(self) -> tuple[int, int]:
        """Drop every page and checkpoint nobody uses now; returns how many of each, none without a cache."""
        dropped = (0, 0) if self.local is None else self.local.prompts.cache.flush()
        self._changed()
        return dropped

    def _cached(self) -> tuple[Collection[bytes], Collection[bytes]]:
        assert self.local is not None
        cache = self.local.prompts.cache
        return cache.pages(), cache.checkpoints()

    def _changed(self) -> None:
        self._may_plan.set()
        self._may_admit.set()
        self._on_change()

    # ---------------------------------------------------------------- what is going on

    def load(self) -> instance_pb2.Load:
        """Snapshot of queue and pools, without readiness."""
        scheduler = self.scheduler
        pages, slots, rows = (
            scheduler.memory.page_counts(),
            scheduler.memory.slot_counts(),
            scheduler.rows.counts(),
        )
        drafts = scheduler.limits.draft_tokens > 0
        rings = rows if scheduler.memory.has_rings_of_rows else slots
        filed = None if self.local is None else self.local.prompts.cache.slot_counts()
        return instance_pb2.Load(
            running=scheduler.n_holding,
            waiting=scheduler.n_waiting,
            pages_free=pages.free,
            pages_used=pages.held,
            pages_cached=pages.cached,
            pages_quarantined=pages.quarantined,
            pages_total=pages.total,
            state_slots_used=slots.held,
            state_slots_quarantined=slots.quarantined,
            state_slots_total=slots.total,
            rows_used=rows.held,
            draft_slots_used=rings.held if drafts else 0,
            draft_slots_total=rings.total if drafts else 0,
            transfers=self.intake.n_transfers,
            rank_tokens=scheduler.rank_tokens(),
            waiting_tokens=0 if self.local is None else self.local.prompts.waiting_tokens,
            state_slots_pinned=0 if filed is None else filed.pinned,
            state_slots_checkpoint=0 if filed is None else filed.checkpoints,
        )

    def stalled_s(self) -> float:
        """Seconds since the last acknowledgement while a plan is in flight, else 0."""
        return _now() - self._last_result_at if self._steps.n_in_flight else 0.0

    def _log(self, caller: Caller) -> None:
        """One line per request, at its end, and how long it queued."""
        request, now = caller.request, _now()
        if request.wait_s is not None:
            self._metrics.queue_s.observe(request.wait_s)
        first = caller.first_token_s
        n, drafts = len(request.outputs), request.drafts.total
        log.info(
            "request finished",
            extra={
                "request_id": request.spec.request_id,
                "attempt": request.spec.attempt,
                "prefill": caller.prefill_instance_id,
                "prompt_tokens": request.prompt_len,
                "output_tokens": n,
                "queue_s": request.wait_s,
                "ttft_s": None if first is None else first - request.arrived_s,
                "itl_s": None if first is None or n < 2 else (now - first) / (n - 1),
                "acceptance": None
                if drafts is None
                else 1 + drafts.n_accepted / max(1, drafts.n_steps),
                "finish": caller.outcome,
            },
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
