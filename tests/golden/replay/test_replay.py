"""Both forms of KDA verify, and the convolution, against answers recomputed from the first token of the sequence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from k3_kernels.api import ReferenceKda
from k3_kernels.reference import conv
from safetensors.torch import load_file
from torch import Tensor

from tests.compare import assert_close

pytestmark = pytest.mark.dspark

TABLE = load_file(Path(__file__).with_name("replay.safetensors"))
CASES = sorted({name.split(".")[0] for name in TABLE})
WIDEST, SLOT, NAN = 5, 1, float("nan")
ATOL = 1e-12


def get(case: str, name: str) -> Tensor:
    return TABLE[f"{case}.{name}"]


def groups(case: str):
    """(first token, width, accepted drafts, read column) of every group."""
    at, column = 0, -1
    rows = zip(get(case, "widths").tolist(), get(case, "accepted").tolist(), strict=True)
    for width, accepted in rows:
        yield at, width, accepted, torch.tensor([column])
        at, column = at + width, accepted


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["snapshots", "replay"])
def test_verify_equals_the_whole_history(case: str, form: str) -> None:
    ops, start = ReferenceKda(), get(case, "start_state")
    columns = WIDEST if form == "snapshots" else 1
    states = torch.full((3 * columns, *start.shape), NAN, dtype=torch.float64)
    states[SLOT * columns] = start
    heads, dim = start.shape[:2]
    records = torch.full((3, heads, 3, WIDEST, dim), NAN, dtype=torch.float64)
    for at, width, accepted, read in groups(case):
        tokens = [get(case, part)[None, at : at + width] for part in ("q", "k", "v", "g", "beta")]
        slots = torch.tensor([SLOT])
        kept = records if form == "replay" else None
        o = ops.verify(*tokens, states, slots, read, columns, kept)
        assert_close(o[0], get(case, "o")[at : at + width], ATOL, f"o of tokens {at} ..")
        if form == "snapshots":
            state = states[SLOT * columns + accepted]
            assert_close(state, get(case, "state_after")[at + accepted], ATOL, f"state {at}")


@pytest.mark.parametrize("case", CASES)
def test_replay_leaves_the_committed_state_once_the_next_group_comes(case: str) -> None:
    ops, start = ReferenceKda(), get(case, "start_state")
    states = torch.stack([start.new_full(start.shape, NAN), start])
    heads, dim = start.shape[:2]
    records = torch.full((2, heads, 3, WIDEST, dim), NAN, dtype=torch.float64)
    committed = start
    for at, width, accepted, read in groups(case):
        tokens = [get(case, part)[None, at : at + width] for part in ("q", "k", "v", "g", "beta")]
        ops.verify(*tokens, states, torch.tensor([SLOT]), read, 1, records)
        assert_close(states[SLOT], committed, ATOL, f"state before token {at}")
        committed = get(case, "state_after")[at + accepted]


@pytest.mark.parametrize("case", CASES)
def test_the_convolution_equals_the_whole_history(case: str) -> None:
    start = get(case, "start_window")
    windows = torch.stack([start.new_full(start.shape, NAN), start])
    tails = torch.full((2, *start.shape[:2], WIDEST - 1, start.shape[2]), NAN, dtype=torch.float64)
    for at, width, _accepted, read in groups(case):
        u = get(case, "u")[None, at : at + width]
        y = conv.verify(u, get(case, "conv_weight"), windows, tails, torch.tensor([SLOT]), read)
        assert_close(y[0], get(case, "y")[at : at + width], ATOL, f"y of tokens {at} ..")
