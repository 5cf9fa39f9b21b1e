"""What follows from the configuration of an engine: sharding, sizes of the pools, and what it says of itself.

Computed once per process, without touching a device. Every rank numbers the same pages and slots. Each service derives
its own `Deployment` and adds its scheduler and its word on peers.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, Self

from k3.cache.layout import fingerprint, layout_document
from k3.config import speculation
from k3.config.load import config_hash, to_json
from k3.config.stages import mesh_of
from k3.config.tree import EngineConfig
from k3.errors import ConfigError
from k3.model.digest import model_digest as folder_digest
from k3.model.dspark_spec import DraftSpec
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from k3.v1 import instance_pb2, plan_pb2, prefill_pb2


@dataclass(frozen=True, slots=True)
class Deployment:
    """config is resolved; `model_digest` names weights and model configuration.

    N_DUMMIES: state slots, the first ones, that no request gets. draft: the drafter whose rows are kept;
    `draft_fingerprint` names those rows and is empty without one.
    """

    ROLE: ClassVar[instance_pb2.Role]
    N_DUMMIES: ClassVar[int] = 0

    config: EngineConfig
    spec: K3Spec
    mesh: Mesh
    model_digest: str
    layout: bytes
    geometry: prefill_pb2.Geometry
    draft: DraftSpec | None = None
    draft_fingerprint: str = ""

    @classmethod
    def of(cls, config: EngineConfig, model_digest: str) -> Self:
        """Read the model's configuration. Raises ModelError; ConfigError when the tree is not resolved."""
        cache = config.cache
        if cache.pages < 1 or cache.state_slots <= cls.N_DUMMIES or config.model.max_model_len < 1:
            raise ConfigError(
                f"cache.pages={cache.pages}, cache.state_slots={cache.state_slots}, model.max_model_len="
                f"{config.model.max_model_len}: expected at least 1 page, {1 + cls.N_DUMMIES} state slots "
                f"({cls.N_DUMMIES} dummies) and 1 token; load the tree with k3.config.load"
            )
        spec = K3Spec.from_folder(Path(config.model.path))
        mesh = mesh_of(config)
        stages = mesh.stage_layers(spec.num_layers)
        draft, draft_fingerprint = speculation.drafter(config), ""
        if draft is not None:
            draft_fingerprint = draft.fingerprint(
                digest=folder_digest(Path(config.spec.drafter)),
                dtype=config.model.dtype,
                page_tokens=cache.page_tokens,
            )
        draft_places = speculation.places(config, spec)
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
                slot_columns=speculation.snapshots(config),
                draft_places=draft_places,
                draft_window=config.spec.draft_window if draft_places else 0,
            ),
            draft=draft,
            draft_fingerprint=draft_fingerprint,
        )

    @property
    def role_name(self) -> str:
        """`prefill` or `decode`."""
        return instance_pb2.Role.Name(self.ROLE).removeprefix("ROLE_").lower()

    @property
    def n_ranks(self) -> int:
        """Rank processes."""
        return self.mesh.size

    @property
    def layout_fingerprint(self) -> str:
        """Hash of the layout document."""
        return fingerprint(self.layout)

    def new_instance_id(self) -> str:
        """Unique per life of the rank group."""
        return f"{self.role_name}-{uuid.uuid4().hex[:12]}"

    def setup(self, instance_id: str) -> plan_pb2.Setup:
        """What every rank is told; the group adds where they meet."""
        return plan_pb2.Setup(
            instance_id=instance_id,
            config_json=to_json(self.config),
            n_pages=self.config.cache.pages,
            n_slots=self.config.cache.state_slots,
        )

    def describe(self, instance_id: str) -> instance_pb2.DescribeResponse:
        """Constant during the life of an instance id; what only decode has is left out."""
        config = self.config
        return instance_pb2.DescribeResponse(
            instance_id=instance_id,
            role=self.ROLE,
            version=version("k3-serving"),
            model=config.model.name,
            model_digest=self.model_digest,
            config_hash=config_hash(config),
            layout_fingerprint=self.layout_fingerprint,
            draft_fingerprint=self.draft_fingerprint,
            geometry=self.geometry,
            max_model_len=config.model.max_model_len,
            vocab_size=self.spec.vocab_size,
            page_tokens=config.cache.page_tokens,
            max_queue=config.schedule.max_queue,
            options_json=to_json(config),
        )
