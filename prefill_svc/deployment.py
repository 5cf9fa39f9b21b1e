"""What follows from the configuration of one prefill service, beyond what every engine has: policy, identity, pairs.

Nothing is reserved as a dummy: the warm-up runs before the first page is handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from k3.cache import hash_chain
from k3.rank import deployment
from k3.transfer.plan import Pair, check_pair
from k3.v1 import instance_pb2, prefill_pb2
from prefill_svc.core import assembly
from prefill_svc.core.cache_events import OnEvent, unheard
from prefill_svc.core.scheduler import PrefillScheduler
from prefill_svc.peers import Identity


@dataclass(frozen=True, slots=True)
class Deployment(deployment.Deployment):
    """A prefill service; see the base."""

    ROLE: ClassVar = instance_pb2.ROLE_PREFILL

    @property
    def has_cache(self) -> bool:
        """Whether prompts reuse what earlier ones left."""
        return assembly.has_cache(self.config)

    @property
    def cache_namespace(self) -> str:
        """Names what cached bytes depend on beside the tokens."""
        return hash_chain.namespace(self.layout_fingerprint, self.draft_fingerprint)

    def chain(self, token_ids: Sequence[int], salt: bytes) -> tuple[bytes, ...]:
        """Hashes of a prompt's pages; none with the cache off."""
        return assembly.page_chain(self.config, self.cache_namespace, token_ids, salt)

    def warnings(self) -> list[str]:
        """What works, but not as well as it could."""
        return assembly.held_up(self.config)

    def scheduler(self, on_event: OnEvent = unheard) -> PrefillScheduler:
        """A scheduler with empty pools; on_event is told what comes to be cached and goes."""
        return assembly.prompt_scheduler(self.config, on_event=on_event)

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
