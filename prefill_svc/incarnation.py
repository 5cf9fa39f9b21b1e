"""One life of the rank group: everything that is lost with it, and the loops that keep it busy.

The scheduler says what to compute, the ranks compute it, the handoff sends it away; this file carries messages between
them. All of it runs in one asyncio loop, so nothing here needs a lock. `run` returns when asked to, and raises
GroupFailed when a rank is lost; the driver decides what happens then.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection

from k3.errors import GroupFailed, K3Error, LayoutMismatch
from k3.rank.lives import Ranks
from k3.telemetry.metrics import PrefillMetrics
from k3.v1 import instance_pb2, plan_pb2, prefill_pb2
from prefill_svc import wire
from prefill_svc.admission import check_start
from prefill_svc.cache_log import CacheLog
from prefill_svc.core.cache_events import unheard
from prefill_svc.core.scheduler import Chunk
from prefill_svc.deployment import Deployment, PlannedPairing
from prefill_svc.export import Export, Stream
from prefill_svc.handoff import Handoff
from prefill_svc.peers import Peers

log = logging.getLogger("k3.prefill")

MAX_COMMANDS = 65536
TICKS_PER_HEARTBEAT = 8
LONGEST_TICK_S = 0.25


class Incarnation:
    """`on_change` is called whenever the load snapshot changes."""

    def __init__(
        self,
        deployment: Deployment,
        instance_id: str,
        nixl_version: str,
        ranks: Ranks,
        metrics: PrefillMetrics,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instance_id = instance_id
        self.ranks = ranks
        self.cache_log = CacheLog(instance_id, self._cached) if deployment.has_cache else None
        self.scheduler = deployment.scheduler(self.cache_log.hear if self.cache_log else unheard)
        self._counted = self.scheduler.cache.totals()
        self._n_held, self._held_since = 0, clock()
        self._deployment = deployment
        self._metrics = metrics
        self._clock = clock
        self._on_change = on_change
        self._idle = asyncio.Event()  # set while no request is open
        self._idle.set()
        self._starts: dict[int, prefill_pb2.Start] = {}
        self._keys = itertools.count(1)
        self._wake = asyncio.Event()
        self._has_inflight = asyncio.Event()
        self._stop = asyncio.Event()
        self._commands: asyncio.Queue[tuple[int, plan_pb2.TransferCommand]] = asyncio.Queue(
            MAX_COMMANDS
        )
        self._last_result_at = clock()
        self.peers = Peers(
            deployment.identity(instance_id, nixl_version),
            PlannedPairing(deployment),
            deployment.n_ranks,
            self._command,
            clock,
        )
        self.handoff = Handoff(
            peers=self.peers,
            prompts=self.scheduler,
            command=self._command,
            clock=clock,
            times=deployment.config.transfer,
            reserve_wait_s=deployment.config.schedule.reserve_wait_s,
            n_ranks=deployment.n_ranks,
            page_tokens=deployment.config.cache.page_tokens,
            on_end=self._ended,
        )

    # ------------------------------------------------------------ requests

    def open(self, start: prefill_pb2.Start, stream: Stream) -> Export:
        """Take a request; `Accepted` is the stream's first message. Raises what makes it impossible."""
        config = self._deployment.config
        check_start(
            start,
            layout_fingerprint=self._deployment.layout_fingerprint,
            vocab_size=self._deployment.spec.vocab_size,
            max_model_len=config.model.max_model_len,
        )
        peer = self.peers.find(start.instance_id)
        prompt_len = len(start.token_ids)
        senders = PlannedPairing(self._deployment).n_senders(peer.geometry, prompt_len)
        key = next(self._keys)
        self.scheduler.submit(
            key,
            prompt_len,
            self._clock(),
            chain=self._deployment.chain(start.token_ids, start.salt),
            takes_hits=not wire.wants_prompt_logprobs(start),
        )
        self._starts[key] = start
        export = self.handoff.open(key, peer, prompt_len, stream)
        self._idle.clear()
        accepted = prefill_pb2.Accepted(
            hit_tokens=self.scheduler.findable(key),
            queue_position=self.scheduler.position(key),
            expected_senders=senders,
        )
        stream.send(prefill_pb2.PrefillResponse(accepted=accepted))
        self._changed()
        return export

    async def connect(self, request: prefill_pb2.ConnectRequest) -> prefill_pb2.ConnectResponse:
        """Introduce a decode instance; counted by outcome."""
        connects = self._metrics.transfer.connects
        try:
            response = await self.peers.connect(request)
        except K3Error as error:
            refused = isinstance(error, LayoutMismatch)
            connects.labels("refused" if refused else "failed").inc()
            log.warning("connect failed", extra={"peer": request.instance_id, "error": str(error)})
            raise
        connects.labels("ok").inc()
        return response

    def fail(self, error: K3Error) -> None:
        """The ranks are gone: end every request and every introduction."""
        self.handoff.fail_all(error)
        for peer in self.peers.all():
            self.peers.lose(peer, str(error))

    def abort_all(self, error: K3Error) -> None:
        """End every request with `error`, each after what was posted for it has ended."""
        self.handoff.abort_all(error)

    async def settled(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    @property
    def n_open(self) -> int:
        """Requests waiting, computing or being sent."""
        return self.handoff.n_open

    # ------------------------------------------------------------ loops

    async def run(self) -> None:
        """Work until `stop`. Raises GroupFailed when the ranks are lost."""
        loops = (self._plan, self._absorb, self._listen, self._speak, self._tick)
        tasks = [asyncio.create_task(loop(), name=f"prefill {loop.__name__}") for loop in loops]
        stop = asyncio.create_task(self._stop.wait(), name="prefill stop")
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

    def stop(self) -> None:
        """Let `run` return."""
        self._stop.set()

    async def _plan(self) -> None:
        """Keep the ranks busy: whenever something changed, plan as much as may be in flight."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (plan := self.scheduler.plan(self._clock())) is not None:
                if self.scheduler.n_inflight == 1:
                    self._last_result_at = self._clock()
                message = wire.step_plan(plan, self._starts)
                self._has_inflight.set()
                self._metrics.inflight.set(self.scheduler.n_inflight)
                await self.ranks.send_plan(message)
                self.handoff.planned(plan.step_id, plan.chunks)
                self._count_cache()
                self._on_change()

    async def _absorb(self) -> None:
        """Acknowledgements, one per plan and in order."""
        while True:
            await self._has_inflight.wait()
            result = await self.ranks.next_result()
            now = self._last_result_at = self._clock()
            drawn = [(row.request, row.epoch) for row in result.rows if row.tokens]
            chunks = self.scheduler.advance(result.step_id, drawn)
            rows = {row.request: row for row in result.rows}
            for chunk in chunks:
                self._computed(chunk, rows.get(chunk.key), now)
            self._metrics.chunk_s.observe(result.step_s)
            self._metrics.bubble_s.inc(result.waited_s)
            self._metrics.inflight.set(self.scheduler.n_inflight)
            self._count_cache()
            if self.scheduler.n_inflight == 0:
                self._has_inflight.clear()
            self._changed()

    def _computed(self, chunk: Chunk, row: plan_pb2.RowResult | None, now: float) -> None:
        """One chunk of a live request is done: prompt log probabilities, then the first token."""
        self._metrics.tokens.inc(chunk.length)
        start, request = self._starts[chunk.key], self.scheduler.request(chunk.key)
        assert request is not None
        self.handoff.computed(chunk.key, chunk.end)
        if row is None:
            return
        if wire.wants_prompt_logprobs(start):
            message = wire.prompt_logprobs(chunk, start, row.prompt_tokens)
            self.handoff.tell(chunk.key, prefill_pb2.PrefillResponse(prompt_logprobs=message))
        if chunk.is_final:
            queue_s = request.started_s - request.arrived_s
            self._metrics.queue_s.observe(queue_s)
            prefilled = prefill_pb2.Prefilled(
                prompt_tokens=request.prompt_len,
                token=row.tokens[0],
                cached_tokens=request.hit_tokens,
                queue_s=queue_s,
                compute_s=now - request.started_s,
            )
            self.handoff.prefilled(chunk.key, prefilled)

    async def _listen(self) -> None:
        while True:
            rank, status = await self.ranks.next_status()
            self.handoff.on_status(rank, status)

    async def _speak(self) -> None:
        while True:
            rank, command = await self._commands.get()
            await self.ranks.command(rank, command)

    async def _tick(self) -> None:
        heartbeat_s = self._deployment.config.transfer.heartbeat_s
        pause_s = min(LONGEST_TICK_S, heartbeat_s / TICKS_PER_HEARTBEAT)
        while True:
            await asyncio.sleep(pause_s)
            self.handoff.tick()

    def flush_cache(self) -> tuple[int, int]:
        """Drop every page and checkpoint from the cache; returns how many of each."""
        dropped = self.scheduler.cache.flush()
        self._changed()
        return dropped

    def _cached(self) -> tuple[Collection[bytes], Collection[bytes]]:
        cache = self.scheduler.cache
        return cache.pages(), cache.checkpoints()

    def _count_cache(self) -> None:
        """Pass on by how much the cache's own counters grew, and how long requests were held since the last time."""
        totals = self.scheduler.cache.totals()
        self._metrics.prefix.grew({name: n - self._counted[name] for name, n in totals.items()})
        self._counted = totals
        now = self._clock()
        self._metrics.held_s.inc(self._n_held * (now - self._held_since))
        self._n_held, self._held_since = self.scheduler.n_held, now
        self._metrics.held.set(self._n_held)

    def _command(self, rank: int, command: plan_pb2.TransferCommand) -> None:
        try:
            self._commands.put_nowait((rank, command))
        except asyncio.QueueFull as error:
            raise GroupFailed(f"{MAX_COMMANDS} commands wait; rank {rank} does not read") from error

    def _changed(self) -> None:
        self._wake.set()
        self._on_change()

    def _ended(self, export: Export) -> None:
        """One line per request, at its end."""
        start = self._starts.pop(export.key)
        if not self._starts:
            self._idle.set()
        self._observe(export)
        first = export.prefilled
        log.info(
            "request finished",
            extra={
                "request_id": start.request_id,
                "attempt": start.attempt,
                "peer": export.peer.instance_id,
                "prompt_tokens": export.prompt_len,
                "cached_tokens": None if first is None else first.cached_tokens,
                "queue_s": None if first is None else first.queue_s,
                "compute_s": None if first is None else first.compute_s,
                "tail_s": export.tail_s,
                "bytes": export.total_bytes,
                "finish": "ok" if export.error is None else export.error.code,
                "error": None if export.error is None else str(export.error),
            },
        )
        self._changed()

    def _observe(self, export: Export) -> None:
        transfer = self._metrics.transfer
        for sent in export.sent.values():
            for pool, n_bytes in sent.bytes.items():
                transfer.bytes.labels(_BYTE_KINDS.get(pool, "kda")).inc(n_bytes)
        code = "aborted" if export.error is None else export.error.code
        if code == "fenced":
            transfer.fenced_writes.inc()
        if code == "self_fence":
            transfer.leases_expired.inc()
        if export.tail_s is not None:
            transfer.seconds.observe(export.tail_s)
        elif export.destination is not None:
            transfer.failures.labels(_FAILURES.get(code, "handle")).inc()

    # ------------------------------------------------------------ what is going on

    def load(self) -> instance_pb2.Load:
        """Snapshot of queues and pools, without readiness."""
        scheduler = self.scheduler
        pages, slots = scheduler.page_counts(), scheduler.slot_counts()
        return instance_pb2.Load(
            running=scheduler.n_open - scheduler.n_waiting,
            waiting=scheduler.n_waiting,
            waiting_tokens=scheduler.waiting_tokens,
            pages_free=pages.free,
            pages_used=pages.held,
            pages_cached=pages.cached,
            pages_quarantined=pages.quarantined,
            pages_total=pages.total,
            state_slots_used=slots.held,
            state_slots_total=slots.total,
            state_slots_pinned=slots.pinned,
            state_slots_checkpoint=slots.checkpoints,
            pages_pinned=scheduler.pinned_pages,
            transfers=self.handoff.n_transfers,
        )

    def stalled_s(self) -> float:
        """Seconds since the last acknowledgement while a plan is in flight, else 0."""
        return self._clock() - self._last_result_at if self.scheduler.n_inflight else 0.0


_BYTE_KINDS = {"latent": "kv", "kda": "kda", "conv": "kda", "draft": "draft"}
_FAILURES = {
    "aborted": "aborted",
    "draining": "aborted",
    "transfer_stalled": "stalled",
    "peer_lost": "peer_lost",
    "self_fence": "lease",
    "not_received": "lease",
    "deadline_exceeded": "deadline",
}
