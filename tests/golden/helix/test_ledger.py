"""The ledger's closed forms against the published tables: closed_forms, partition, verify_groups, traces."""

import json
import lzma
from pathlib import Path

import pytest
import torch
from k3_kernels.reference.tables import verify_tables

from decode_svc.capacity import worst_len
from decode_svc.ledger import Ledger
from tests.helix_formulas import group_share

pytestmark = pytest.mark.helix

HERE = Path(__file__).parent


def table(name: str) -> list[dict]:
    return json.loads((HERE / f"{name}.json").read_text())


GROUPS = json.loads(lzma.decompress((HERE / "verify_groups.json.xz").read_bytes()))


def geometry(entry: dict) -> str:
    return f"P{entry['page_tokens']}-C{entry['cp_size']}"


@pytest.mark.parametrize("entry", table("closed_forms"), ids=geometry)
def test_closed_forms_agree(entry: dict) -> None:
    ledger, ranks = Ledger(entry["page_tokens"], entry["cp_size"]), range(entry["cp_size"])
    for row in entry["rows"]:
        n = row["n"]
        found = {
            "n": n,
            "owner": ledger.owner(n),
            "local_index": ledger.local_index(n),
            "local_len": [ledger.local_len(n, r) for r in ranks],
            "content_pages": [ledger.content_pages(n, r) for r in ranks],
            "ledger_blocks": ledger.pages(n),
        }
        assert found == row
        assert ledger.global_pos(ledger.local_index(n), ledger.owner(n)) == n


def test_prompts_are_partitioned_as_published() -> None:
    for case in table("partition"):
        ledger, n = Ledger(case["page_tokens"], case["cp_size"]), case["prompt_len"]
        ranks = range(case["cp_size"])
        assert [ledger.positions(n, r) for r in ranks] == case["positions_by_rank"], case
        assert [list(ledger.prompt_pages(n, r)) for r in ranks] == case["pages_by_rank"], case


@pytest.mark.parametrize("entry", GROUPS, ids=geometry)
def test_verify_groups_agree_on_every_rank(entry: dict) -> None:
    ledger = Ledger(entry["page_tokens"], entry["cp_size"])
    for case in entry["groups"]:
        base, group = case["base"], 1 + case["draft_len"]
        assert base == case["prompt_len"] + case["generated"] - 1
        shares = [group_share(ledger, base, group, r) for r in range(ledger.cp)]
        for r, (share, expected) in enumerate(zip(shares, case["ranks"], strict=True)):
            assert list(share.slots) == expected["local_slot"]
            assert list(share.bounds) == expected["kv_bound"]
            assert share.owned == expected["owned_new"]
            assert share.kv_len == expected["kv_len"]
            assert ledger.local_len(base, r) == expected["cached_before"]
            zero = [i for i, bound in enumerate(share.bounds) if bound == 0]
            assert zero == expected["zero_bound_rows"]
        trap = any(s.kv_len > 0 and 0 in s.bounds for s in shares)
        assert trap == case["zero_bound_trap"]


@pytest.mark.parametrize("entry", GROUPS, ids=geometry)
def test_device_tables_equal_the_host_form(entry: dict) -> None:
    """Page ids are scrambled: local slot j lies in page table[j // P] of the pool."""
    p, c = entry["page_tokens"], entry["cp_size"]
    ledger = Ledger(p, c)
    for case in entry["groups"][::7]:
        base, group = case["base"], 1 + case["draft_len"]
        width = ledger.pages(base + group)
        pages = torch.arange(width).flip(0).to(torch.int32)[None] + 3
        for r in range(c):
            valid = torch.ones(1, group, dtype=torch.bool)
            position, slot, bound = verify_tables(torch.tensor([base]), pages, valid, p, c, r)
            share = group_share(ledger, base, group, r)
            assert position.tolist() == list(range(base, base + group))
            assert bound.tolist() == list(share.bounds)
            local = [-1 if s < 0 else int(pages[0, s // p]) * p + s % p for s in share.slots]
            assert slot.tolist() == local


@pytest.mark.parametrize(
    "entry", table("traces"), ids=lambda e: f"{geometry(e)}-{len(e['overlap'])}"
)
def test_traces_step_by_step(entry: dict) -> None:
    ledger, trace = Ledger(entry["page_tokens"], entry["cp_size"]), entry["sync"]
    ranks, group = range(ledger.cp), 1 + trace["draft_len"]
    base, held, written = trace["prompt_len"], ledger.pages(trace["prompt_len"]), {}
    for step in trace["steps"]:
        assert step["base"] == base
        needed = base + group
        during = ledger.pages(needed)
        assert (needed, during) == (step["capacity_needed"], step["blocks_during"])
        assert max(0, during - held) == step["blocks_opened"]
        shares = [group_share(ledger, base, group, r) for r in ranks]
        assert [s.kv_len for s in shares] == step["kv_len_by_rank"]
        assert [s.owned for s in shares] == step["owned_new_by_rank"]
        ends = ledger.owner(base), ledger.owner(base + group - 1)
        assert (ends[0] != ends[1]) == step["straddles"]  # a group may come round to its first rank
        for pos in range(base, base + group):
            written[ledger.owner(pos), ledger.local_index(pos)] = (pos, step["step"])
        base += step["accepted"] + 1
        held = ledger.pages(base)
        assert [ledger.local_len(base, r) for r in ranks] == step["kept_len_by_rank"]
        assert (base, held) == (step["kept_length"], step["blocks_after_rewind"])
        assert during - held == step["blocks_released"]
    assert base == trace["next_base"]
    rows = sorted([r, j, pos, step] for (r, j), (pos, step) in written.items())
    assert [row for row in rows if row[2] < base] == trace["decode_kv_live"]
    assert [row for row in rows if row[2] >= base] == trace["decode_kv_stale"]


@pytest.mark.parametrize(
    "entry", table("traces"), ids=lambda e: f"{geometry(e)}-{len(e['overlap'])}"
)
def test_overlapped_steps_stay_within_what_the_host_reserves(entry: dict) -> None:
    """The host plans from the base of the last acknowledged step: one group in flight, one being planned."""
    ledger, group = Ledger(entry["page_tokens"], entry["cp_size"]), 1 + entry["sync"]["draft_len"]
    for number, step in enumerate(entry["overlap"]):
        in_flight = 1 if number else 0
        reserve = step["stale_base"] + (in_flight + 1) * group
        assert reserve == step["capacity_to_reserve"]
        assert step["base"] == step["stale_base"] + step["correction"]
        assert step["capacity_used"] == step["base"] + group <= reserve
        assert step["positions"] == list(range(step["base"], step["base"] + group))
        for r, rank in enumerate(step["ranks"]):
            share = group_share(ledger, step["base"], group, r)
            assert (list(share.slots), list(share.bounds)) == (rank["local_slot"], rank["kv_bound"])
            assert (share.owned, share.kv_len) == (rank["owned_new"], rank["kv_len"])


def test_worst_case_covers_the_last_overlapped_step() -> None:
    """One output token is missing, `depth - 1` steps are in flight and one more is planned."""
    n, m, k, in_flight = 17, 5, 3, 1
    last_confirmed_base = n + (m - 1) - 1
    assert worst_len(n, m, k, in_flight) == last_confirmed_base + (in_flight + 1) * (k + 1)
