"""Pools that a rank has no room for."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3.config.caches import layout_of
from k3.config.commandline import CommandLine
from k3.config.load import load_engine
from k3.device import CpuDevice
from k3.errors import ConfigError
from k3.model.spec import K3Spec
from k3.rank.loading import allocate


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
