"""The device's table formulas against the ledger vectors: every group, every rank."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from k3_kernels.reference.tables import local_len, verify_tables

pytestmark = pytest.mark.helix

HERE = Path(__file__).parent
GROUPS = json.loads(lzma.decompress((HERE / "verify_groups.json.xz").read_bytes()))
FORMS = json.loads((HERE / "closed_forms.json").read_text())


def _name(item: dict[str, Any]) -> str:
    return f"P{item['page_tokens']}-C{item['cp_size']}"


@pytest.mark.parametrize("item", FORMS, ids=_name)
def test_local_lengths_match(item: dict[str, Any]) -> None:
    n = torch.tensor([row["n"] for row in item["rows"]])
    for rank in range(item["cp_size"]):
        got = local_len(n, item["page_tokens"], item["cp_size"], rank)
        assert got.tolist() == [row["local_len"][rank] for row in item["rows"]]


@pytest.mark.parametrize("item", GROUPS, ids=_name)
def test_slots_and_bounds_of_verify_groups_match(item: dict[str, Any]) -> None:
    """Local slots count in a rank's own order, which an identity page table makes pool slots."""
    page, cp = item["page_tokens"], item["cp_size"]
    for group in item["groups"]:
        width = (group["base"] + group["draft_len"]) // (page * cp) + 1
        table = torch.arange(width)[None]
        valid = torch.ones(1, group["draft_len"] + 1, dtype=torch.bool)
        for rank, expected in enumerate(group["ranks"]):
            base = torch.tensor([group["base"]])
            position, slot, bound = verify_tables(base, table, valid, page, cp, rank)
            assert position.tolist() == expected["positions"], group
            assert slot.tolist() == expected["local_slot"], group
            assert bound.tolist() == expected["kv_bound"], group
