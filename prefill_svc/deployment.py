"""What follows from the configuration of one prefill service: sharding, pools, policy, and what it says of itself.

Computed once per process, without touching a device. Every rank numbers the same pages and slots. Nothing is reserved
as a dummy: the warm-up runs before the first page is handed out.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

from k3.cache.layout import fingerprint, layout_document
from k3.config.load import config_hash, to_json
from k3.config.tree import EngineConfig
from k3.errors import ConfigError
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from k3.transfer.plan import Pair, check_pair
from k3.v1 import instance_pb2, plan_pb2, prefill_pb2
from prefill_svc.core.scheduler import Policy, PrefillScheduler
from prefill_svc.peers import Identity


@dataclass(frozen=True, slots=True)
class Deployment:
    """config is resolved; `model_digest` names weights and model configuration."""

    config: EngineConfig
    spec: K3Spec
    mesh: Mesh
    model_digest: str
    layout: bytes
    geometry: prefill_pb2.Geometry

    @classmethod
    def of(cls, config: EngineConfig, model_digest: str) -> Deployment:
        """Read the model's configuration. Raises ModelError; ConfigError when the tree is not resolved."""
        cache, parallel = config.cache, config.parallel
        if cache.pages < 1 or cache.state_slots < 1 or config.model.max_model_len < 1:
            raise ConfigError(
                f"cache.pages={cache.pages}, cache.state_slots={cache.state_slots}, model.max_model_len="
                f"{config.model.max_model_len}: the tree is not resolved; load it with k3.config.load"
            )
        spec = K3Spec.from_folder(Path(config.model.path))
        mesh = Mesh(parallel.pp, parallel.tp, 1)
        stages = mesh.stage_layers(spec.num_layers)
        return cls(
            config=config,
            spec=spec,
            mesh=mesh,
            model_digest=model_digest,
            layout=layout_document(
                spec,
                page_tokens=cache.page_tokens,
                dtype=config.model.dtype,
                model_digest=model_digest,
            ),
            geometry=prefill_pb2.Geometry(
                pp=mesh.pp,
                tp=mesh.tp,
                cp=1,
                stage_bounds=[0, *accumulate(len(layers) for layers in stages)],
                n_pages=cache.pages,
                n_slots=cache.state_slots,
                slot_columns=1,
            ),
        )

    @property
    def n_ranks(self) -> int:
        """Rank processes."""
        return self.mesh.size

    @property
    def layout_fingerprint(self) -> str:
        """Hash of the layout document."""
        return fingerprint(self.layout)

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

    def setup(self, instance_id: str) -> plan_pb2.Setup:
        """What every rank is told; the group adds where they meet."""
        return plan_pb2.Setup(
            instance_id=instance_id,
            config_json=to_json(self.config),
            n_pages=self.config.cache.pages,
            n_slots=self.config.cache.state_slots,
            n_draft_slots=0,
        )

    def identity(self, instance_id: str, nixl_version: str) -> Identity:
        """What peers compare."""
        return Identity(
            instance_id=instance_id,
            layout=self.layout,
            layout_fingerprint=self.layout_fingerprint,
            draft_fingerprint="",
            nixl_version=nixl_version,
            geometry=self.geometry,
        )

    def describe(self, instance_id: str) -> instance_pb2.DescribeResponse:
        """Constant during the life of an instance id."""
        config = self.config
        return instance_pb2.DescribeResponse(
            instance_id=instance_id,
            role=instance_pb2.ROLE_PREFILL,
            version=version("k3-serving"),
            model=config.model.name,
            model_digest=self.model_digest,
            config_hash=config_hash(config),
            layout_fingerprint=self.layout_fingerprint,
            draft_fingerprint="",
            geometry=self.geometry,
            max_model_len=config.model.max_model_len,
            vocab_size=self.spec.vocab_size,
            page_tokens=config.cache.page_tokens,
            max_rows=0,
            max_queue=config.schedule.max_queue,
            draft_tokens=0,
            depth=0,
            options_json=to_json(config),
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


def new_instance_id() -> str:
    """Unique per incarnation of the rank group."""
    return f"prefill-{uuid.uuid4().hex[:12]}"
