"""What a rank loads and allocates, as its configuration says: kernels, layers of its stage, drafter, pools.

Device and groups are there already. Shared by ranks (`k3/rank/main.py`) and the one that needs no front
(`decode_svc/rank/alone.py`).
"""

from __future__ import annotations

from pathlib import Path

from k3_kernels.api import Backends, Ops, select

from k3.cache.layout import CacheLayout
from k3.cache.storage import Storage
from k3.config import speculation
from k3.config.tree import EngineConfig
from k3.device import Device
from k3.errors import ConfigError
from k3.model.dspark import DraftContext, Drafter, open_context, open_drafter
from k3.model.k3 import Stage
from k3.model.registry import open_stage
from k3.model.weights import Progress
from k3.parallel.collectives import Groups
from k3.parallel.mesh import Place


def kernels(config: EngineConfig, device: Device) -> Ops:
    """The kernels of `backends.*`. Raises BackendError for one that is not installed."""
    backends = config.backends
    return select(Backends(backends.attention, backends.kda, backends.moe), device.torch_device)


def load_stage(
    config: EngineConfig,
    place: Place,
    groups: Groups,
    ops: Ops,
    device: Device,
    progress: Progress | None = None,
) -> Stage:
    """This rank's layers; on decode's last stage with the embedding that its drafter shares. Raises ModelError."""
    draft = speculation.drafter(config)
    return open_stage(
        Path(config.model.path),
        place,
        groups,
        ops,
        dtype=config.model.dtype,
        device=device.torch_device,
        moe_weights=config.backends.moe_weights,
        exchange=config.parallel.exchange,
        taps=draft.taps if draft is not None else (),
        tap_stream=draft.tap_stream if draft is not None else "prefix",
        shared_embedding=draft is not None and config.role != "prefill",
        progress=progress,
    )


def allocate(
    config: EngineConfig, layout: CacheLayout, n_pages: int, n_slots: int, device: Device
) -> Storage:
    """The pools of a layout. Raises ConfigError where the device has no room for them."""
    n_rings = speculation.rings(config)
    needed, room = layout.total_bytes(n_pages, n_slots, n_rings), device.room_bytes()
    if needed > room:
        fitting = max(0, layout.pages_for(room, n_slots, n_rings))
        raise ConfigError(
            f"cache.pages={n_pages}, cache.state_slots={n_slots}: {needed} bytes on {device.torch_device}, where "
            f"{room} are free: {fitting} pages; lower cache.pages, or cache.memory_bytes where cache.pages is 0"
        )
    return Storage(
        layout,
        n_pages,
        n_slots,
        device.torch_device,
        n_rings=n_rings,
        fill_nan=config.cache.fill_nan,
    )


def load_context(config: EngineConfig, stage: Stage) -> DraftContext | None:
    """What prefill's last stage needs of a drafter; elsewhere None. Raises ModelError."""
    if not speculation.has_drafter(config) or not stage.place.is_last:
        return None
    return open_context(
        Path(config.spec.drafter),
        stage.place.shard,
        dtype=config.model.dtype,
        device=stage.device,
        ops=stage.ops.dense,
    )


def load_drafter(config: EngineConfig, stage: Stage) -> Drafter | None:
    """The drafter on decode's last stage, with the target's embedding and head; elsewhere None. Raises ModelError."""
    if not speculation.has_drafter(config) or not stage.place.is_last:
        return None
    assert stage.embed is not None, "the last stage was opened without shared_embedding"
    assert stage.head is not None, "the last stage has no head"
    return open_drafter(
        Path(config.spec.drafter),
        stage.place.shard,
        stage.groups.shard,
        draft_tokens=config.spec.draft_tokens,
        embed=stage.embed,
        head=stage.head,
        dtype=config.model.dtype,
        device=stage.device,
        ops=stage.ops.dense,
        confidence=speculation.is_by_confidence(config),
    )
