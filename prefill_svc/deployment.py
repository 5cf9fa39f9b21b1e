"""What follows from the configuration of one prefill service, beyond what every engine has: policy, identity, pairs.

Nothing is reserved as a dummy: the warm-up runs before the first page is handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from k3.cache import hash_chain
from k3.config.stages import chunk_costs
from k3.rank import deployment
from k3.transfer.plan import Pair, check_pair
from k3.v1 import instance_pb2, prefill_pb2
from prefill_svc.core.cache_events import OnEvent, unheard
from prefill_svc.core.checkpoints import Mode
from prefill_svc.core.chunk_size import ChunkCost
from prefill_svc.core.ladder import Ladder, RungPolicy
from prefill_svc.core.scheduler import Policy, PrefillScheduler
from prefill_svc.peers import Identity


@dataclass(frozen=True, slots=True)
class Deployment(deployment.Deployment):
    """A prefill service; see the base."""

    ROLE: ClassVar = instance_pb2.ROLE_PREFILL

    @property
    def has_cache(self) -> bool:
        """Whether prompts reuse what earlier ones left."""
        return self.config.cache.prefix == "on"

    @property
    def cache_namespace(self) -> str:
        """Names what cached bytes depend on beside the tokens."""
        return hash_chain.namespace(self.layout_fingerprint, self.draft_fingerprint)

    def chain(self, token_ids: Sequence[int], salt: bytes) -> tuple[bytes, ...]:
        """Hashes of a prompt's pages; none with the cache off."""
        if not self.has_cache:
            return ()
        page_tokens = self.config.cache.page_tokens
        parent = hash_chain.root(self.cache_namespace, page_tokens, salt=salt)
        return hash_chain.page_hashes(parent, token_ids, page_tokens)

    def ladder(self) -> Ladder:
        """Where states are kept."""
        cache = self.config.cache
        if not self.has_cache:
            return Ladder(cache.page_tokens)
        return Ladder(
            cache.page_tokens,
            cache.checkpoint_interval,
            cache.checkpoint_anchor,
            policy=RungPolicy(cache.checkpoint_rungs),
        )

    def warnings(self) -> list[str]:
        """What works, but not as well as it could."""
        cache, budget = self.config.cache, self.mesh.pp * self.config.schedule.token_budget
        is_held = self.has_cache and self.mesh.pp > 1 and cache.checkpoint_mode == "fork_hold"
        if is_held and cache.checkpoint_interval < budget:
            return [
                f"cache.checkpoint_mode=fork_hold with cache.checkpoint_interval={cache.checkpoint_interval} below "
                f"parallel.pp * schedule.token_budget = {budget}: stages wait for one another; use fork_at_schedule"
            ]
        return []

    def scheduler(self, on_event: OnEvent = unheard) -> PrefillScheduler:
        """A scheduler with empty pools; on_event is told what comes to be cached and goes."""
        config = self.config
        budget, costs = config.schedule.token_budget, chunk_costs(config)
        policy = Policy(
            token_budget=budget,
            max_inflight=self.mesh.pp,
            chunk_align=config.cache.page_tokens,
            max_running=config.schedule.max_rows,
            max_queue=config.schedule.max_queue,
            short_len=budget,
            max_long=self.mesh.pp,
            chunk_cost=ChunkCost(*costs, budget) if costs else None,
        )
        return PrefillScheduler(
            policy,
            n_pages=config.cache.pages,
            n_slots=config.cache.state_slots,
            page_tokens=config.cache.page_tokens,
            ladder=self.ladder(),
            mode=Mode(config.cache.checkpoint_mode),
            on_event=on_event,
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
