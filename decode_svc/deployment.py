"""What follows from the configuration of one decode service: sharding, pools, limits, and what it says of itself.

Computed once per process, without touching a device. Every rank numbers the same pages and slots; state slot 0 and row
0 are dummies for padding and warm-up.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

from decode_svc.intake.source import Pair
from decode_svc.ledger import Ledger
from decode_svc.scheduler import DecodeScheduler, Limits
from k3.cache.layout import fingerprint, layout_document
from k3.cache.pages import PagePool
from k3.cache.slots import SlotPool
from k3.config.load import config_hash, to_json
from k3.config.tree import EngineConfig
from k3.errors import ConfigError, LayoutMismatch
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from k3.transfer.plan import check_pair, expected_senders
from k3.v1 import instance_pb2, plan_pb2, prefill_pb2

PROTO_VERSION = 1
N_DUMMIES = 1


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
        if cache.pages < 1 or cache.state_slots <= N_DUMMIES or config.model.max_model_len < 1:
            raise ConfigError(
                f"cache.pages={cache.pages}, cache.state_slots={cache.state_slots}, model.max_model_len="
                f"{config.model.max_model_len}: expected at least 1 page, 2 slots (one is a dummy) and 1 token; "
                "load the tree with k3.config.load"
            )
        spec = K3Spec.from_folder(Path(config.model.path))
        mesh = Mesh(parallel.pp, parallel.tp, parallel.cp)
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
                cp=mesh.cp,
                stage_bounds=[0, *accumulate(len(layers) for layers in stages)],
                n_pages=cache.pages,
                n_slots=cache.state_slots,
                slot_columns=1 + config.spec.draft_tokens,
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

    def scheduler(self) -> DecodeScheduler:
        """A scheduler with empty pools."""
        config = self.config
        return DecodeScheduler(
            Ledger(config.cache.page_tokens, self.mesh.cp),
            Limits(
                max_queue=config.schedule.max_queue,
                max_model_len=config.model.max_model_len,
                depth=config.schedule.depth,
                draft_tokens=config.spec.draft_tokens,
            ),
            pages=PagePool(config.cache.pages),
            state_slots=SlotPool(config.cache.state_slots - N_DUMMIES, first=N_DUMMIES),
            rows=SlotPool(config.schedule.max_rows, first=N_DUMMIES),
        )

    def setup(self, instance_id: str) -> plan_pb2.Setup:
        """What every rank is told; the group chooses its own rendezvous."""
        return plan_pb2.Setup(
            instance_id=instance_id,
            config_json=to_json(self.config),
            n_pages=self.config.cache.pages,
            n_slots=self.config.cache.state_slots,
        )

    def introduction(
        self, instance_id: str, movers: list[plan_pb2.MoverReady]
    ) -> prefill_pb2.ConnectRequest:
        """How this instance presents itself to a prefill instance. movers: in flat order, newest agents."""
        return prefill_pb2.ConnectRequest(
            proto_version=PROTO_VERSION,
            instance_id=instance_id,
            layout=self.layout,
            layout_fingerprint=self.layout_fingerprint,
            nixl_version=movers[0].nixl_version,
            geometry=self.geometry,
            ranks=[mover.endpoint for mover in movers],
        )

    def check(self, answer: prefill_pb2.ConnectResponse) -> None:
        """Raise LayoutMismatch unless the answering prefill instance fits this one."""
        if answer.layout_fingerprint != self.layout_fingerprint:
            raise LayoutMismatch(
                f"layout_fingerprint: ours {self.layout_fingerprint} != {answer.layout_fingerprint} of "
                f"{answer.instance_id}; give both sides the same model, dtype and cache.page_tokens"
            )
        check_pair(self.spec, answer.geometry, self.geometry)

    def senders(self, pair: Pair, prompt_len: int, rank: int) -> tuple[int, ...]:
        """Flat prefill ranks that decode rank `rank` hears from; may be empty."""
        return expected_senders(
            self.spec,
            pair.geometry,
            self.geometry,
            page_tokens=self.config.cache.page_tokens,
            prompt_len=prompt_len,
            rank=rank,
        )

    def describe(self, instance_id: str) -> instance_pb2.DescribeResponse:
        """Constant during the life of an instance id."""
        config = self.config
        return instance_pb2.DescribeResponse(
            instance_id=instance_id,
            role=instance_pb2.ROLE_DECODE,
            version=version("k3-serving"),
            model=config.model.name,
            model_digest=self.model_digest,
            config_hash=config_hash(config),
            layout_fingerprint=self.layout_fingerprint,
            geometry=self.geometry,
            max_model_len=config.model.max_model_len,
            vocab_size=self.spec.vocab_size,
            page_tokens=config.cache.page_tokens,
            max_rows=config.schedule.max_rows,
            max_queue=config.schedule.max_queue,
            draft_tokens=config.spec.draft_tokens,
            depth=config.schedule.depth,
            options_json=to_json(config),
        )


def new_instance_id() -> str:
    """Unique per incarnation of the rank group."""
    return f"decode-{uuid.uuid4().hex[:12]}"
