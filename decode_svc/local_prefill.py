"""Prompts computed by the decode instance itself: all of them under `role: both`, short ones under `local_prefill_max`.

Embeds prefill's scheduler (`prefill_svc.core`). A request has its whole worst case reserved when it comes here. Its
chunks write decode's own pages and state slot, and the row that goes on from them opens in a later plan of the same
line, so nothing is sent, waited for or proven quiet. An abort gives the memory back at once, since every plan that
reuses it runs later; where transfers write too, once no plan in flight names it. No clock and no I/O of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from decode_svc import wire
from decode_svc.caller import Caller
from decode_svc.memory import CachedMemory, Hold, Place
from decode_svc.request import DecodeRequest
from decode_svc.scheduler import DecodeScheduler
from k3.rpc.convert import token_from_proto
from k3.telemetry.metrics import DecodeMetrics
from k3.v1 import plan_pb2, prefill_pb2
from prefill_svc import wire as chunk_wire
from prefill_svc.core.checkpoints import Tenant
from prefill_svc.core.prefix_cache import Holding, Prompt
from prefill_svc.core.scheduler import Chunk, PrefillScheduler


class LocalPrefill:
    """See the module's docstring."""

    def __init__(
        self,
        instance_id: str,
        longest: int,
        decode: DecodeScheduler,
        prompts: PrefillScheduler,
        metrics: DecodeMetrics,
        *,
        has_drafter: bool,
    ) -> None:
        """longest: prompts up to it are computed here. prompts: it takes memory only where its cache is decode's."""
        self.prompts = prompts
        self._instance_id, self._longest = instance_id, longest
        self._decode, self._metrics, self._has_drafter = decode, metrics, has_drafter
        self._callers: dict[int, Caller] = {}
        self._starts: dict[int, prefill_pb2.Start] = {}
        self._counted = prompts.cache.totals()
        self._newest: dict[int, int] = {}  # by request: the newest plan that names it
        self._acknowledged = 0
        self._late: list[tuple[int, Hold]] = []  # memory that a plan in flight may still write

    @property
    def n_late(self) -> int:
        """Ended requests whose memory waits for a plan in flight."""
        return len(self._late)

    def takes(self, request: DecodeRequest) -> bool:
        """Whether the prompt is computed here."""
        return request.prompt_len <= self._longest

    def is_computing(self, request: DecodeRequest) -> bool:
        """Whether the request is here now."""
        return request.key in self._callers

    def start(self, caller: Caller, now: float) -> None:
        """Begin to compute the prompt of a request that was just admitted."""
        request = caller.request
        self._decode.fill(request)
        caller.opened_s = now
        self._callers[request.key] = caller
        self._starts[request.key] = wire.prefill_start(request.spec)
        self.prompts.adopt(request.key, self._holding(request), now)

    def abort(self, request: DecodeRequest) -> None:
        """End a request whose prompt is not complete."""
        del self._callers[request.key], self._starts[request.key]
        self.prompts.abort(request.key)
        self.prompts.release(request.key)
        self._drop(request)

    def _drop(self, request: DecodeRequest) -> None:
        hold, newest = self._decode.drop(request), self._newest.pop(request.key, 0)
        if hold is None:
            return
        if newest > self._acknowledged:
            self._late.append((newest, hold))
        else:
            self._decode.settle(hold)

    def _holding(self, request: DecodeRequest) -> Holding:
        memory, held = self._decode.memory, request.held
        if isinstance(memory, CachedMemory):
            return memory.holding(request)
        return Holding(Prompt(request.prompt_len), held.pages, Tenant(held.state_slot), 0, 0)

    # ---------------------------------------------------------------- steps

    def plan(self, now: float) -> plan_pb2.StepPlan | None:
        """The next chunks, numbered among themselves; None when there are none or enough are in flight."""
        plan = self.prompts.plan(now)
        self._count()
        if plan is None:
            return None
        self._newest |= {chunk.key: plan.step_id for chunk in plan.chunks}
        return chunk_wire.step_plan(plan, self._starts)

    def absorb(self, step: int, result: plan_pb2.StepResult, now: float) -> None:
        """Take the acknowledgement of chunks; complete prompts begin to run. step: their number among themselves."""
        rows = {row.request: row for row in result.rows if row.tokens}
        drawn = [(row.request, row.epoch) for row in rows.values()]
        chunks = self.prompts.advance(step, drawn)
        self._acknowledged = step
        for newest, hold in [late for late in self._late if late[0] <= step]:
            self._late.remove((newest, hold))
            self._decode.settle(hold)
        self._metrics.local.step_s.observe(result.step_s)
        for chunk in chunks:
            self._metrics.local.tokens.inc(chunk.length)
            if chunk.is_final:
                self._complete(chunk, rows[chunk.key], now)
        self._count()

    def _complete(self, chunk: Chunk, row: plan_pb2.RowResult, now: float) -> None:
        """A prompt is in the caches: its first token goes out, and its row may open."""
        caller, prompt = self._callers[chunk.key], self.prompts.request(chunk.key)
        assert prompt is not None
        request, holding = caller.request, prompt.holding
        assert holding is not None
        caller.first_token_s = caller.filled_s = now
        caller.prefill_instance_id, caller.cached_tokens = self._instance_id, prompt.hit_tokens
        place = Place(holding.pages, holding.tenant.live)
        del self._callers[chunk.key], self._starts[chunk.key]
        self.prompts.release(chunk.key)
        self._metrics.local.prompts.inc()
        kept = self._decode.first_token(request, token_from_proto(row.tokens[0]))
        caller.tell(kept, now)
        if kept.finish is not None:
            self._drop(request)
            return
        del self._newest[request.key]
        self._decode.moved(request, place)
        request.draft_valid = self._has_drafter
        if self._has_drafter:
            request.bootstrap = "local"
            self._metrics.spec.bootstrap.labels(request.bootstrap).inc()
        self._decode.filled(request)

    def _count(self) -> None:
        """Pass on by how much the cache's own counters grew."""
        totals = self.prompts.cache.totals()
        grown: Mapping[str, int] = {n: total - self._counted[n] for n, total in totals.items()}
        self._metrics.prefix.grew(grown)
        self._counted = totals
