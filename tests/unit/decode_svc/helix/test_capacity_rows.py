"""R16, R17, R31, R40: bytes and tokens of real K3 under the mapping each pool is really built with."""

import json
from pathlib import Path

import pytest

from decode_svc.ledger import Ledger
from k3.cache.layout import build_layout
from k3.model.spec import K3Spec
from k3.parallel.mesh import Mesh
from tests.helix_formulas import DraftCost, PoolCost, StateCost, global_to_local, local_to_global

pytestmark = pytest.mark.helix

REAL = Path(__file__).parents[4] / "docs/examples/kimi-k3-config.json"
TOKEN_BYTES = 24 * 576 * 2


@pytest.fixture(scope="module")
def k3() -> K3Spec:
    return K3Spec.from_config(json.loads(REAL.read_text()))


def test_r16_recurrent_state_is_costed_on_the_ranks_that_share_it(k3: K3Spec) -> None:
    """65 slots over 16 ranks are 1.70 GiB on each; costed unsharded they withheld 27.2 GiB."""
    slots = 65
    spread = build_layout(k3, Mesh(cp=16), 0, page_tokens=64, dtype="bfloat16")
    whole = build_layout(k3, Mesh(), 0, page_tokens=64, dtype="bfloat16")
    assert slots * spread.slot_bytes == 1_825_574_400
    assert slots * whole.slot_bytes == 29_209_190_400
    cost = StateCost(69, 96, 128, 4, state_bytes=4, conv_bytes=2)
    assert (cost.of(16), cost.of(1)) == (spread.slot_bytes, whole.slot_bytes)


@pytest.mark.parametrize("ranks", [1, 16])
@pytest.mark.parametrize("form", ["snapshots", "replay"])
def test_rolling_a_group_back_costs_what_the_pools_allocate(
    k3: K3Spec, ranks: int, form: str
) -> None:
    """Groups of 8 on one rank: 3.07 GB of states beside the committed one, or 0.12 GB of records."""
    kept = {"columns": 8} if form == "snapshots" else {"records": 8}
    layout = build_layout(k3, Mesh(cp=ranks), 0, page_tokens=64, dtype="bfloat16", **kept)
    state = StateCost(69, 96, 128, 4, state_bytes=4, conv_bytes=2)
    cost = PoolCost(
        Ledger(64, ranks), TOKEN_BYTES, state.of(ranks), record_bytes=state.rollback(ranks, 8, form)
    )
    assert cost.slot_bytes == layout.slot_bytes
    whole = {"snapshots": 3_074_383_872, "replay": 117_006_336}
    assert state.rollback(ranks, 8, form) * ranks == whole[form]
    assert cost.pages(40 << 30, 9) == layout.pages_for(40 << 30, 9)


@pytest.mark.parametrize("mesh", [Mesh(cp=16), Mesh(tp=4, cp=4), Mesh(tp=16)], ids=str)
def test_r16_any_mesh_of_sixteen_ranks_costs_the_same_state_and_the_same_page(
    k3: K3Spec, mesh: Mesh
) -> None:
    layout = build_layout(k3, mesh, 0, page_tokens=64, dtype="bfloat16")
    assert 65 * layout.slot_bytes == 1_825_574_400
    assert layout.page_bytes == 64 * TOKEN_BYTES


def test_r16_the_memory_it_frees_becomes_pages(k3: K3Spec) -> None:
    layout = build_layout(k3, Mesh(cp=16), 0, page_tokens=64, dtype="bfloat16")
    freed = 29_209_190_400 - 1_825_574_400
    budget = 40 << 30
    assert layout.pages_for(budget, 65) - layout.pages_for(budget - freed, 65) == pytest.approx(
        freed / layout.page_bytes, abs=1
    )
    cost = PoolCost(Ledger(64, 16), TOKEN_BYTES, layout.slot_bytes)
    assert cost.pages(budget, 65) == layout.pages_for(budget, 65)


def test_r17_a_drafters_heads_are_costed_on_all_ranks_and_per_global_token() -> None:
    cost = DraftCost("gqa", layers=5, width=64, kv_heads=8, dtype_bytes=2)
    assert cost.of(16) == 1_280
    ledger = Ledger(64, 16)
    paged = PoolCost(ledger, TOKEN_BYTES, 0, draft_token_bytes=cost.of(16))
    assert (paged.page_bytes - 64 * TOKEN_BYTES) // 64 == 20_480  # per local token
    assert cost.of(1) == 10_240  # the wrong way: the mapping of the context ranks


def test_a_replicated_latent_drafter_would_take_three_quarters_of_the_budget_without_a_ring() -> (
    None
):
    latent = DraftCost("mla", layers=5, width=576, kv_heads=1, dtype_bytes=2)
    per_local = latent.of(16) * 16
    assert per_local == 92_160
    assert per_local / (per_local + TOKEN_BYTES) == pytest.approx(0.77, abs=0.005)


def test_r31_a_partial_page_buys_nothing() -> None:
    ledger = Ledger(32, 4)
    assert local_to_global(ledger, 100) == 384
    assert global_to_local(ledger, 401) == 128


@pytest.mark.parametrize("cp", [1, 4])
def test_r40_a_paged_draft_cache_grows_with_cp_and_a_ring_does_not(cp: int) -> None:
    ledger = Ledger(32, cp)
    paged = PoolCost(ledger, TOKEN_BYTES, 0, draft_token_bytes=100)
    ring = PoolCost(ledger, TOKEN_BYTES, 0, draft_token_bytes=100, ring_rows=8192 + 32)
    assert paged.page_bytes - ring.page_bytes == 32 * cp * 100
    assert ring.ring_bytes == (8192 + 32) * 100
