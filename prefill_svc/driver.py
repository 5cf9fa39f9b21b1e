"""The engine behind `k3-prefill`: takes requests into the current life of its rank group (`k3/rank/lives.py`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from k3.rank.lives import GroupEngine, MakeGroup, Ranks
from k3.telemetry.metrics import PrefillMetrics
from k3.v1 import plan_pb2, prefill_pb2
from prefill_svc.cache_log import CacheLog
from prefill_svc.deployment import Deployment
from prefill_svc.export import Export, Stream
from prefill_svc.incarnation import Incarnation

log = logging.getLogger("k3.prefill")


class PrefillEngine(GroupEngine[Incarnation]):
    """Implements the process frame's `Engine`."""

    def __init__(
        self,
        deployment: Deployment,
        make_group: MakeGroup,
        metrics: PrefillMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(deployment, make_group, clock)
        self.metrics = metrics
        self._prefill = deployment

    def open(self, start: prefill_pb2.Start, stream: Stream) -> tuple[Incarnation, Export]:
        """Take a request into the current life. Raises Unavailable, or what `Incarnation.open` raises."""
        life = self.open_life()
        return life, life.open(start, stream)

    def flush_cache(self) -> tuple[int, int]:
        """Pages and checkpoints dropped; what running prompts hold stays theirs."""
        return self.life().flush_cache()

    def cache_feed(self) -> CacheLog | None:
        """Events of the current life; None without one, or with the cache off."""
        return None if self._life is None else self._life.cache_log

    def _new_life(
        self, instance_id: str, movers: list[plan_pb2.MoverReady], ranks: Ranks
    ) -> Incarnation:
        for warning in self._prefill.warnings():
            log.warning(warning)
        self.metrics.transfer.self_test.set(min(m.self_test.bytes_per_s for m in movers))
        return Incarnation(
            self._prefill,
            instance_id,
            movers[0].nixl_version,
            ranks,
            self.metrics,
            self.load_changed.set,
            self._clock,
        )
