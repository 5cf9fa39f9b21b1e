"""Rank arithmetic: coordinates, groups, shards, partitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.errors import ConfigError
from k3.parallel.mesh import Mesh, Shard

pytestmark = pytest.mark.prefill

sizes = st.integers(1, 5)


@given(sizes, sizes, sizes)
def test_rank_and_place_are_inverse(pp: int, tp: int, cp: int) -> None:
    mesh = Mesh(pp, tp, cp)
    places = [mesh.place(rank) for rank in range(mesh.size)]
    assert [place.rank for place in places] == list(range(mesh.size))
    assert len({(p.stage, p.tp_rank, p.cp_rank) for p in places}) == mesh.size


@given(sizes, sizes, sizes)
def test_groups_partition_the_ranks(pp: int, tp: int, cp: int) -> None:
    mesh = Mesh(pp, tp, cp)
    for groups in (mesh.stage_groups(), mesh.context_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in mesh.stage_groups():
        assert [mesh.place(rank).shard.index for rank in group] == list(range(tp * cp))
    for group in mesh.context_groups():
        assert [mesh.place(rank).cp_rank for rank in group] == list(range(cp))
        assert len({mesh.place(rank).query_shard for rank in group}) == 1


@given(sizes, sizes, sizes)
def test_repurposed_mesh_has_the_same_shards(pp: int, tp: int, cp: int) -> None:
    mesh = Mesh(pp, tp, cp)
    other = mesh.repurposed()
    assert (other.size, other.cp) == (mesh.size, 1)
    for rank in range(mesh.size):
        assert other.place(rank).shard == mesh.place(rank).shard
        assert other.place(rank).stage == mesh.place(rank).stage


@given(sizes, st.integers(1, 4))
def test_output_heads_lie_inside_the_query_heads(tp: int, cp: int) -> None:
    mesh, heads = Mesh(tp=tp, cp=cp), 3 * tp * cp
    for rank in range(mesh.size):
        place = mesh.place(rank)
        query = range(heads)[place.query_shard.of(heads)]
        out = range(heads)[place.shard.of(heads)]
        assert out[0] in query
        assert out[-1] in query
        assert out[0] - query[0] == place.cp_rank * len(out)


@given(st.integers(1, 9), st.integers(1, 100))
def test_stages_cover_all_layers_and_the_last_never_takes_remainder(pp: int, layers: int) -> None:
    if pp > layers:
        with pytest.raises(ConfigError):
            Mesh(pp).stage_layers(layers)
        return
    ranges = Mesh(pp).stage_layers(layers)
    assert [i for r in ranges for i in r] == list(range(layers))
    assert len(ranges[-1]) == layers // pp
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize(
    "pp, counts",
    [(2, [47, 46]), (4, [23, 23, 24, 23]), (8, [11, 11, 12, 12, 12, 12, 12, 11])],
)
def test_k3_is_split_as_published(pp: int, counts: list[int]) -> None:
    assert [len(r) for r in Mesh(pp).stage_layers(93)] == counts


def test_an_explicit_partition_overrides() -> None:
    assert [len(r) for r in Mesh(3, partition=(5, 1, 3)).stage_layers(9)] == [5, 1, 3]


@pytest.mark.parametrize("partition", [(9,), (5, 4, 0), (4, 4, 2)])
def test_a_partition_that_does_not_fit_is_refused(partition: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="partition"):
        Mesh(3, partition=partition).stage_layers(9)


def test_an_axis_that_does_not_divide_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="96 cannot be split over 5"):
        Shard(0, 5).of(96)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_mesh_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="not in a mesh of 4"):
        Mesh(2, 2).place(rank)


@pytest.mark.parametrize("axis", ["pp", "tp", "cp"])
def test_an_empty_axis_is_refused(axis: str) -> None:
    with pytest.raises(ConfigError, match=f"{axis}=0"):
        Mesh(**{axis: 0})
