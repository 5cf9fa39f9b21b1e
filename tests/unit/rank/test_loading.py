"""What a rank loads for its configuration, and pools that it has no room for."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3.config.caches import layout_of
from k3.config.commandline import CommandLine
from k3.config.load import load_engine
from k3.device import CpuDevice
from k3.errors import ConfigError
from k3.model.spec import K3Spec
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import Mesh
from k3.rank.loading import allocate, kernels, load_stage


class Small(CpuDevice):
    """Has room for so many bytes."""

    def __init__(self, room: int) -> None:
        super().__init__(1)
        self._room = room

    def room_bytes(self) -> int:
        return self._room


def test_pools_beyond_the_memory_are_refused_with_what_was_asked_and_what_is_free() -> None:
    config = load_engine("prefill", CommandLine(flags={"cache.pages": "6"}), {}).require()
    layout = layout_of(config, K3Spec.from_folder(Path(config.model.path)), 0)
    needed, spare = layout.total_bytes(6, 3), layout.total_bytes(4, 3)
    with pytest.raises(ConfigError) as caught:
        allocate(config, layout, 6, 3, Small(needed - 1))
    for told in ("cache.pages=6", f" {needed} bytes on cpu", f"{needed - 1} are free: 5 pages"):
        assert told in str(caught.value)
    with pytest.raises(ConfigError, match=f"where {spare} are free: 4 pages; lower cache.pages"):
        allocate(config, layout, 6, 3, Small(spare))
    assert allocate(config, layout, 6, 3, Small(needed)).n_pages == 6


def test_the_room_of_a_host_is_a_number_of_bytes() -> None:
    assert 1 << 20 < CpuDevice(1).room_bytes() < 1 << 50


@pytest.mark.parametrize(
    ("command", "flags"),
    [("prefill", {}), ("decode", {"spec.draft_tokens": "2"})],
    ids=["prefill", "decode"],
)
def test_only_a_drafter_that_proposes_shares_the_embedding_of_a_last_stage(
    command: str, flags: dict[str, str]
) -> None:
    flags = flags | {"spec.drafter": "draft-mla", "backends.moe": "reference"}
    config = load_engine(command, CommandLine(flags=flags), {}).require()
    device, last = CpuDevice(1), Mesh(pp=2, tp=1, cp=1).place(1)
    stage = load_stage(config, last, solo_groups(), kernels(config, device), device)
    assert (stage.embed is not None) is (command == "decode")


@pytest.mark.parametrize("fill_nan", ["on", "off"])
def test_pools_begin_without_a_number_where_that_is_asked_for(fill_nan: str) -> None:
    flags = {"cache.pages": "2", "cache.fill_nan": fill_nan}
    config = load_engine("prefill", CommandLine(flags=flags), {}).require()
    layout = layout_of(config, K3Spec.from_folder(Path(config.model.path)), 0)
    latent = allocate(config, layout, 2, 1, CpuDevice(1)).pools["latent"]
    assert bool(latent.isnan().all()) is (fill_nan == "on")
