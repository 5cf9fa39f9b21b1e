"""Where a verify group finds its state and leaves its states, against the golden table, in both forms of verify.

A row that continues from somebody's checkpoint has no read table of its own here: the checkpoint is copied into the
row's slot before its first group, and the group reads what a slot that was just filled reads (column -1). The table
then says what must come out: whatever the group reads is the source, and whatever it writes is its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from k3_kernels.reference import conv, kda, replay
from torch import Tensor

from k3.cache.layout import build_layout
from k3.cache.storage import Storage
from k3.model.spec import K3Spec
from k3.parallel.mesh import SOLO

pytestmark = pytest.mark.prefill

FOLDER = Path(__file__).parent
CASES = json.loads((FOLDER / "fork_tables.json").read_text())["cases"]
SPEC = K3Spec.from_folder(FOLDER.parent / "k3")
N_SLOTS = 7
DTYPE = torch.float64


@pytest.fixture(params=["snapshots", "replay"])
def form(request: pytest.FixtureRequest) -> str:
    return request.param


class Slots:
    """State slots that hold their own numbers: every pool slot of states its index, every window its slot's."""

    def __init__(self, k: int, form: str) -> None:
        self.columns, self.form = (k + 1 if form == "snapshots" else 1), form
        layout = build_layout(
            SPEC,
            SOLO.mesh,
            0,
            page_tokens=4,
            dtype="float64",
            columns=self.columns,
            records=0 if form == "snapshots" else k + 1,
        )
        self.storage = Storage(layout, 1, N_SLOTS, torch.device("cpu"), fill_nan=True)
        caches = self.storage.caches()
        layer = min(caches.states)
        self.states, self.windows = caches.states[layer], caches.windows[layer]
        self.tails, self.records = caches.tails[layer], caches.records.get(layer)
        self.states[:] = torch.arange(len(self.states), dtype=DTYPE).view(-1, 1, 1, 1)
        self.windows[:] = torch.arange(N_SLOTS, dtype=DTYPE).view(-1, 1, 1, 1, 1)

    def previous_group(self, slot: int, column: int) -> None:
        """What a group whose token `column` is the committed one left beside the state: changes that change nothing.

        Behind that token there is a rejected draft's, which must not be looked at.
        """
        self.tails[slot] = torch.nan
        self.tails[slot, :, :, : max(0, column)] = self.windows[slot, 0, 0, 0, 0]
        if self.records is not None:
            self.records[slot] = torch.nan
            self.records[slot, :, :, : column + 1] = 0

    def verify(self, slot: int, column: int, group: int) -> tuple[Tensor, Tensor]:
        """A group that changes no state; what its tokens read of the state and, as slots, of the window."""
        slots_B, column_B = torch.tensor([slot]), torch.tensor([column])
        _n, heads, dim, _k = self.states.shape
        zeros = torch.zeros(1, group, heads, dim, dtype=DTYPE)
        beta, q = torch.zeros(1, group, heads, dtype=DTYPE), zeros.clone()
        q[..., 0] = 1
        if self.records is None:
            o = kda.verify(
                q, zeros, zeros, zeros, beta, self.states, slots_B, column_B, self.columns
            )
        else:
            o = replay.verify(
                q, zeros, zeros, zeros, beta, self.states, self.records, slots_B, column_B
            )
        weight = torch.zeros(heads, 3, dim, self.windows.shape[-1] + 1, dtype=DTYPE)
        weight[..., 0] = 1  # a token sees the oldest input of its window
        u = torch.full((1, group, heads, 3, dim), 1000.0, dtype=DTYPE)
        y = conv.verify(u, weight, self.windows, self.tails, slots_B, column_B)
        return o, y


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_a_group_reads_and_writes_where_the_golden_table_says(
    case: dict[str, Any], form: str
) -> None:
    given, group = case["in"], case["in"]["k"] + 1
    slot, source = given["write_group"], given["source_group"]
    is_forked = source >= 0
    slots = Slots(given["k"], form)
    column = given["num_accepted"] - 1
    slots.previous_group(slot, column)
    if is_forked:
        # The golden row copies to the column it resumes from; ours resumes from where the copy lies.
        assert all(read == source * group for read in case["read_slots"][: column + 1])
        slots.storage.copy_slot(source, slot)
        column = -1
        slots.previous_group(slot, column)  # of another tenant: nothing of it may be looked at
    before = slots.states.clone()
    state_read, window_read = slots.verify(slot, column, group)

    assert case["recurrent_read"] == (source * group if is_forked else slot * group + column)
    if form == "snapshots":
        expected = case["recurrent_read"]
        written = torch.zeros(len(before), dtype=torch.bool)
        written[case["write_slots"]] = True
        assert (slots.states[case["write_slots"]] == expected).all()
    else:  # one pool slot per slot: whatever is folded, the number is its slot's
        expected = case["recurrent_read"] // group
        written = torch.arange(len(before)) == slot
        assert slots.records is not None
        assert slots.records[slot].isfinite().all(), "records of the last tenant were kept"
    assert (state_read == expected).all()
    assert torch.equal(slots.states[~written], before[~written]), "another slot was written"
    seen = torch.nn.functional.silu(torch.tensor(float(case["conv_read"] // group), dtype=DTYPE))
    torch.testing.assert_close(window_read[0, 0], seen.expand_as(window_read[0, 0]))
