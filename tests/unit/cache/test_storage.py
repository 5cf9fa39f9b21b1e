"""Pools: shapes, alignment, per-layer views, NaN fill and zeroing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from k3.cache.layout import build_layout
from k3.cache.storage import ALIGNMENT, Storage
from k3.errors import ConfigError
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh

NANO = K3Spec.from_folder(Path(__file__).parents[2] / "golden/k3")
CPU = torch.device("cpu")


def _storage(mesh: Mesh | None = None, stage: int = 0, columns: int = 1) -> Storage:
    layout = build_layout(
        NANO, mesh or Mesh(), stage, page_tokens=4, dtype="float32", columns=columns
    )
    return Storage(layout, 5, 3, CPU, fill_nan=True)


def test_pools_have_the_shapes_that_are_transferred() -> None:
    pools = _storage(Mesh(tp=2), columns=4).pools
    assert {name: tuple(pool.shape) for name, pool in pools.items()} == {
        "latent": (5, 3, 4, 40),
        "kda": (12, 2, 6, 16, 16),
        "conv": (3, 2, 6, 3, 16, 3),
    }


def test_pools_are_contiguous_aligned_and_nan_filled() -> None:
    storage = _storage()
    for pool in storage.pools.values():
        assert pool.is_contiguous()
        assert pool.data_ptr() % ALIGNMENT == 0
        assert bool(pool.isnan().all())


def test_layer_views_share_the_pools_memory() -> None:
    storage = _storage(columns=2)
    caches = storage.caches()
    assert sorted(caches.latents) == [3, 7, 8]
    assert sorted(caches.states) == sorted(caches.windows) == sorted(caches.tails)
    caches.latents[7][4, 2] = 1.0
    assert bool((storage.pools["latent"][4, 1, 2] == 1).all())
    caches.states[4][5] = 2.0
    assert bool((storage.pools["kda"][5, :, 3] == 2).all())
    caches.windows[6][1] = 3.0
    assert bool((storage.pools["conv"][1, :, 5] == 3).all())
    assert caches.tails[0].shape == (3, 4, 3, 1, 16)


def test_a_stage_without_a_layer_kind_has_no_pool_of_it() -> None:
    last = _storage(Mesh(pp=9), stage=8)
    assert sorted(last.pools) == ["latent"]
    assert last.caches().states == {}
    first = _storage(Mesh(pp=9), stage=0)
    assert sorted(first.pools) == ["conv", "kda"]
    assert first.caches().latents == {}


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_zeroing_a_tail_touches_only_the_rows_from_there_on(rows: int) -> None:
    storage = _storage()
    storage.zero_tail(2, rows)
    pool = storage.pools["latent"]
    assert bool((pool[2, :, rows:] == 0).all())
    assert int(pool.isnan().sum()) == pool.numel() - 3 * (4 - rows) * 40


def test_zeroing_a_slot_covers_all_its_columns() -> None:
    storage = _storage(columns=3)
    storage.zero_slot(1)
    assert (
        storage.pools["kda"].isnan().flatten(1).any(1).tolist()
        == [True] * 3 + [False] * 3 + [True] * 3
    )
    assert storage.pools["conv"].isnan().flatten(1).any(1).tolist() == [True, False, True]
    tails = storage.caches().tails[0]
    assert tails.isnan().flatten(1).any(1).tolist() == [True, False, True]


@pytest.mark.parametrize("pages, slots", [(0, 1), (1, 0)])
def test_empty_pools_are_refused(pages: int, slots: int) -> None:
    layout = build_layout(NANO, Mesh(), 0, page_tokens=4, dtype="float32")
    with pytest.raises(ConfigError, match="at least 1"):
        Storage(layout, pages, slots, CPU)
