"""Partition, taps and bank depth of every stage against the golden table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3.errors import ConfigError, ModelError
from k3.model.spec import K3Spec, LayerKind
from k3.parallel.frame import check_taps, frame_layout
from k3.parallel.mesh import Mesh

pytestmark = pytest.mark.prefill

HERE = Path(__file__).parent
CASES = json.loads((HERE / "relay_layout.json").read_text())["cases"]
NANO = K3Spec.from_folder(HERE.parent / "k3")


def _read(case: dict[str, Any]) -> tuple[Mesh, K3Spec, tuple[int, ...]]:
    given = case["in"]
    partition = None if given["partition"] is None else tuple(given["partition"])
    spec = replace(
        NANO,
        layer_kinds=(LayerKind.KDA,) * given["num_layers"],
        hidden_size=given["hidden_size"],
        attn_res_block=given["attn_res_block_size"],
    )
    return Mesh(given["pp"], partition=partition), spec, tuple(given["listed_ids"])


@pytest.mark.parametrize("case", [c for c in CASES if "out" in c], ids=lambda c: c["id"])
def test_stages_own_layers_taps_and_bank_as_listed(case: dict[str, Any]) -> None:
    mesh, spec, listed = _read(case)
    check_taps(listed, spec.num_layers)
    stages = case["out"]["stages"]
    for stage, layers in zip(stages, mesh.stage_layers(spec.num_layers), strict=True):
        incoming = frame_layout(spec, layers.start, listed)
        outgoing = frame_layout(spec, layers.stop, listed)
        assert [layers.start, layers.stop] == stage["layers"]
        assert list(incoming.taps) == stage["incoming_ids"]
        assert list(outgoing.taps) == stage["out_ids"]
        assert list(outgoing.taps[len(incoming.taps) :]) == stage["own_ids"]
        assert len(incoming.taps) == stage["own_col_offset"]
        assert len(outgoing.taps) == stage["out_blocks"]
        assert len(outgoing.taps) * outgoing.hidden_size == stage["out_width"]
        assert incoming.bank == stage["bank_candidates_in"]


@pytest.mark.parametrize("case", [c for c in CASES if "error" in c], ids=lambda c: c["id"])
def test_lists_that_cannot_work_are_refused_with_the_golden_code(case: dict[str, Any]) -> None:
    mesh, spec, listed = _read(case)

    def read() -> None:
        mesh.stage_layers(spec.num_layers)
        check_taps(listed, spec.num_layers)

    with pytest.raises((ConfigError, ModelError)) as caught:
        read()
    assert caught.value.code == case["error"]
