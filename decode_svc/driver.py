"""The engine behind `k3-decode`: takes requests into the current life of its rank group (`k3/rank/lives.py`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from decode_svc import wire
from decode_svc.caller import Caller
from decode_svc.deployment import Deployment
from decode_svc.holdings import holdings, overview
from decode_svc.incarnation import Incarnation, Introduction
from decode_svc.intake.remote import RemotePrefill
from k3.errors import Unavailable
from k3.rank.lives import GroupEngine, MakeGroup, Ranks
from k3.rpc.client import ChannelPool
from k3.rpc.ops import Answer, problem
from k3.telemetry.metrics import DecodeMetrics
from k3.v1 import decode_pb2, plan_pb2
from prefill_svc.cache_log import CacheLog

log = logging.getLogger("k3.decode")


class DecodeEngine(GroupEngine[Incarnation]):
    """Implements the process frame's `Engine`. `channels`: to prefill instances, closed at the end."""

    def __init__(
        self,
        deployment: Deployment,
        make_group: MakeGroup,
        channels: ChannelPool,
        metrics: DecodeMetrics,
    ) -> None:
        super().__init__(deployment, make_group)
        self.metrics = metrics
        self._decode = deployment
        self._channels = channels

    def open(self, request: decode_pb2.GenerateRequest) -> tuple[Incarnation, Caller]:
        """Take a request into the current life. Raises Unavailable, RequestRejected or QueueFull."""
        life = self.open_life()
        return life, life.open(wire.request_spec(request, self._decode.spec.vocab_size))

    def ledger(self, query: Mapping[str, str]) -> Answer:
        """`/admin/ledger`: who holds what of `request_id`, or of all open requests together."""
        try:
            scheduler = self.life().scheduler
        except Unavailable as error:
            return problem(503, error.code, str(error))
        requests = scheduler.open_requests()
        if "request_id" not in query:
            return Answer(200, overview(scheduler.ledger, requests))
        found = [r for r in requests if r.spec.request_id == query["request_id"]]
        if not found:
            wrong = f"request_id={query['request_id']!r}: no such request is open here"
            return problem(404, "not_found", wrong)
        return Answer(200, holdings(scheduler.ledger, found[-1], self._decode.latent_token_bytes))

    def drafts(self, query: Mapping[str, str]) -> Answer:
        """`/admin/drafts`: confidences of the newest drafts beside how many were accepted; empty unless observed."""
        del query
        try:
            samples = self.life().scheduler.policy.samples
        except Unavailable as error:
            return problem(503, error.code, str(error))
        found = [{"confidence": s.confidence, "accepted": s.n_accepted} for s in samples]
        return Answer(200, {"samples": found})

    def flush_cache(self) -> tuple[int, int]:
        """Pages and checkpoints dropped; there are some only where prompts are computed here."""
        return self.life().flush_cache()

    def cache_feed(self) -> CacheLog | None:
        """Events of the current life; None without one, or without a prefix cache."""
        return None if self._life is None else self._life.cache_log

    async def stop(self) -> None:
        """End every request, all ranks and the channels. Idempotent."""
        await super().stop()
        await self._channels.close()

    def _new_life(
        self, instance_id: str, movers: list[plan_pb2.MoverReady], ranks: Ranks
    ) -> Incarnation:
        for warning in self._decode.warnings():
            log.warning(warning)
        self.metrics.transfer.self_test.set(min(m.self_test.bytes_per_s for m in movers))
        return Incarnation(
            self._decode,
            instance_id,
            movers,
            ranks,
            self._source,
            self.metrics,
            self.load_changed.set,
        )

    def _source(self, introduction: Introduction) -> RemotePrefill:
        return RemotePrefill(self._channels, introduction, self._decode.check)
