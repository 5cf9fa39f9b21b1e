"""The model of a decode step against the published table: roofline.json; and what follows from it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from k3.bench.cost import PRESETS, Hardware, Layout, Load, Sizes, break_even, capacity, step_cost
from k3.model.spec import K3Spec

pytestmark = pytest.mark.helix

HERE = Path(__file__).parent
TABLE = json.loads((HERE / "roofline.json").read_text())
REAL = HERE.parents[2] / "docs" / "examples" / "kimi-k3-config.json"
K3 = Sizes(**TABLE["model"])
H200 = PRESETS["h200_nvlink"]


def layout_of(row: dict) -> Layout:
    helix = row["layout"] == "helix"
    return Layout(
        tp=1 if helix else row["ranks"], cp=row["ranks"] if helix else 1, exchange="latent"
    )


def test_the_presets_are_the_published_parameter_sets() -> None:
    for name, values in TABLE["hardware"].items():
        assert replace(PRESETS[name], memory_bytes=0.0) == Hardware(**values)


def test_the_sizes_of_the_real_model_come_from_its_configuration() -> None:
    spec = K3Spec.from_config(json.loads(REAL.read_text()))
    assert asdict(Sizes.of(spec)) == asdict(K3)


@pytest.mark.parametrize("hardware", TABLE["hardware"])
def test_every_part_of_a_step_agrees(hardware: str) -> None:
    rows = [row for row in TABLE["rows"] if row["hardware"] == hardware]
    assert len(rows) == 36
    for row in rows:
        load = Load(row["batch"], row["context"], row["draft_len"])
        cost = step_cost(K3, PRESETS[hardware], layout_of(row), load)
        found = asdict(cost) | {"total": cost.total}
        for name, value in found.items():
            expected = row[name]
            assert value == (
                pytest.approx(expected, rel=1e-9) if isinstance(value, float) else expected
            ), (name, row)


@pytest.mark.parametrize(
    ("batch", "drafts", "thousands"),
    [
        (1, 0, 88),
        (4, 0, 24),
        (8, 0, 12),
        (32, 0, 4),
        (1, 7, 158),
        (4, 7, 49),
        (8, 7, 31),
        (32, 7, 18),
    ],
)
def test_break_even_contexts_are_the_published_ones(
    batch: int, drafts: int, thousands: int
) -> None:
    found = break_even(K3, H200, Layout(cp=16, exchange="latent"), Load(batch, 0, drafts))
    assert found is not None
    assert found / 1000 == pytest.approx(thousands, abs=1.5)  # a rank holds whole pages: steps


def test_values_win_on_slow_links_and_send_a_quarter_of_the_bytes() -> None:
    load = Load(32, 131072, 7)
    slow = PRESETS["h200_ib"]
    latents = step_cost(K3, slow, Layout(cp=16, exchange="latent"), load)
    values = step_cost(K3, slow, Layout(cp=16, exchange="value"), load)
    assert round(latents.total * 1e3, 1) == 71.9
    assert round(values.total * 1e3, 1) == 63.5
    ratio = latents.a2a_bytes_per_rank_per_layer / values.a2a_bytes_per_rank_per_layer
    assert ratio == pytest.approx((2 * 512 + 4) / (2 * 128 + 4))


def test_gathering_saves_a_reduction_per_mla_layer_and_loses_on_a_large_model() -> None:
    """Each rank then reads gate and output projection whole: 176 M parameters more per layer than the message saves."""
    load, plain = Load(8, 131072), Layout(16)
    value, gather = (step_cost(K3, H200, Layout(2, 8, kind), load) for kind in ("value", "gather"))
    layers = K3.mla_layers + K3.kda_layers + K3.moe_layers
    assert gather.all_reduce / value.all_reduce == pytest.approx(1 - K3.mla_layers / layers)
    more = K3.mla_layers * 2 * K3.gate_and_out * (1 - 1 / 16) / H200.mem_bw
    assert gather.mla_weights - value.mla_weights == pytest.approx(more)
    assert gather.total > value.total
    assert step_cost(K3, H200, replace(plain, exchange="gather"), load) == step_cost(
        K3, H200, plain, load
    )


def test_a_mixed_mesh_lies_between_its_ends() -> None:
    """Keys per rank fall with cp, replicated query weights fall with tp."""
    load = Load(8, 131072)
    costs = [step_cost(K3, H200, Layout(16 // cp, cp), load) for cp in (1, 2, 4, 8, 16)]
    attention = [cost.mla_attention for cost in costs]
    weights = [cost.mla_weights for cost in costs]
    assert attention == sorted(attention, reverse=True)
    assert weights == sorted(weights)


def test_capacity_grows_with_cp_and_eight_devices_are_too_few_for_the_weights() -> None:
    tokens = [capacity(K3, H200, Layout(16 // cp, cp), 8) for cp in (1, 4, 16)]
    assert 0 < tokens[0] < tokens[1] < tokens[2]
    assert tokens[2] / tokens[0] == pytest.approx(16, rel=0.15)
    assert capacity(K3, H200, Layout(cp=8), 8) < 0
