"""What the configuration says of the caches of a rank: `auto` sizes count with the layout that ranks allocate. Pure."""

from __future__ import annotations

from k3.cache.layout import CacheLayout, build_layout
from k3.config import speculation
from k3.config.stages import mesh_of
from k3.config.tree import EngineConfig
from k3.model.spec import K3Spec


def layout_of(config: EngineConfig, spec: K3Spec, stage: int) -> CacheLayout:
    """Fields of a rank on `stage`. Raises ModelError when the drafter's folder cannot be read."""
    return build_layout(
        spec,
        mesh_of(config),
        stage,
        page_tokens=config.cache.page_tokens,
        dtype=config.model.dtype,
        columns=speculation.snapshots(config),
        records=speculation.records(config),
        draft=speculation.drafter(config),
        draft_places=speculation.places(config, spec),
        keeps_context=speculation.keeps_context(config),
    )
