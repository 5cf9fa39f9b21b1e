"""What follows from the configuration of one prefill service, beyond what every engine has: policy, identity, pairs.

Nothing is reserved as a dummy: the warm-up runs before the first page is handed out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from k3.rank import deployment
from k3.transfer.plan import Pair, check_pair
from k3.v1 import instance_pb2, prefill_pb2
from prefill_svc.core.scheduler import Policy, PrefillScheduler
from prefill_svc.peers import Identity


@dataclass(frozen=True, slots=True)
class Deployment(deployment.Deployment):
    """A prefill service; see the base."""

    ROLE: ClassVar = instance_pb2.ROLE_PREFILL

    def scheduler(self) -> PrefillScheduler:
        """A scheduler with empty pools."""
        config = self.config
        policy = Policy(
            token_budget=config.schedule.token_budget,
            max_inflight=self.mesh.pp,
            chunk_align=config.cache.page_tokens,
            max_running=config.schedule.max_rows,
            max_queue=config.schedule.max_queue,
            short_len=config.schedule.token_budget,
            max_long=self.mesh.pp,
        )
        return PrefillScheduler(
            policy,
            n_pages=config.cache.pages,
            n_slots=config.cache.state_slots,
            page_tokens=config.cache.page_tokens,
        )

    def identity(self, instance_id: str, nixl_version: str) -> Identity:
        """What peers compare."""
        return Identity(
            instance_id=instance_id,
            layout=self.layout,
            layout_fingerprint=self.layout_fingerprint,
            draft_fingerprint=self.draft_fingerprint,
            nixl_version=nixl_version,
            geometry=self.geometry,
        )


@dataclass(frozen=True, slots=True)
class PlannedPairing:
    """The transfer planner's word on a peer; see `k3/transfer/plan.py`."""

    deployment: Deployment

    def check(self, peer: prefill_pb2.Geometry) -> None:
        """Raises LayoutMismatch."""
        check_pair(self.deployment.spec, self.deployment.geometry, peer)

    def n_senders(self, peer: prefill_pb2.Geometry, prompt_len: int) -> list[int]:
        """Writers by flat decode rank."""
        pair = Pair.of(self.deployment.spec, self.deployment.geometry, peer)
        n_pages = -(-prompt_len // self.deployment.config.cache.page_tokens)
        return [len(pair.senders(rank, n_pages)) for rank in range(pair.decode.size)]
