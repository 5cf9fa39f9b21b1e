"""The golden vectors on a GPU, by the kernels that services take there, in float32 and in bfloat16.

float32 keeps the tolerances of the vectors' READMEs, doubled where two float32 runs may differ by them. bfloat16 keeps
8 bits of every weight and activation; its tolerances are relative to the norm of what is expected, over all of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from k3_kernels.api import Backends, Ops, select
from k3_kernels.reference import kda as kda_reference
from k3_kernels.reference.tables import verify_tables
from safetensors.torch import load_file
from torch import Tensor

from tests.compare import assert_close
from tests.golden.dspark.test_drafters import KINDS, Recorded
from tests.golden.k3.test_components import KDA_CASES
from tests.model_runner import Pools, solo_stage

GOLDEN = Path(__file__).parents[1] / "golden"
DEVICE = torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16)
CASES = ("case0", "case1", "case2")


def ops() -> Ops:
    return select(Backends(), DEVICE)


def check(
    got: Tensor, expected: Tensor, dtype: torch.dtype, atol: float = 0.0, rtol: float = 0.0
) -> None:
    """Within `atol` of each value in float32; in bfloat16 the norm of the difference within `rtol` of the norm."""
    got, expected = got.float().cpu(), expected.float().cpu()
    if dtype == torch.float32:
        assert_close(got, expected, atol)
        return
    error = float((got - expected).norm() / expected.norm())
    assert error < rtol, f"relative error {error:.4f}"


def pages_of(pools: Pools, layer: int, n: int) -> Tensor:
    """The first `n` latent rows of the only request."""
    return pools.caches.latents[layer][pools.requests[0].pages.long()].flatten(0, 1)[:n]


def expected_of(case: str) -> dict[str, Tensor]:
    golden = load_file(GOLDEN / "k3/cases.safetensors")
    return {k.removeprefix(f"{case}."): v for k, v in golden.items() if k.startswith(case)}


@pytest.mark.parametrize("chunk", [16, 1000])
@pytest.mark.parametrize("case", CASES)
def test_the_model_gives_the_reference_logits_states_and_latents(case: str, chunk: int) -> None:
    """In float32."""
    expected = expected_of(case)
    ids, decode = expected["input_ids"].tolist(), expected["decode_ids"].tolist()
    stage = solo_stage(GOLDEN / "k3", "float32", ops=ops(), device=DEVICE)
    pools = Pools(stage, 1, len(ids) + len(decode))
    request = pools.requests[0]
    check(pools.prefill(request, ids, chunk), expected["logits"], torch.float32, 2e-4)
    for layer, states in pools.caches.states.items():
        check(states[request.slot], expected[f"layer{layer}.kda_state"], torch.float32, 1e-3)
    for layer in pools.caches.latents:
        rows = pages_of(pools, layer, len(ids))
        check(rows, expected[f"layer{layer}.mla_latent"], torch.float32, 1e-3)
    rows = [pools.verify([(request, [token])], [0])[0] for token in decode]
    check(torch.cat(rows), expected["decode_logits"], torch.float32, 2e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_first_states_stay_close_in_bfloat16(case: str) -> None:
    """Only those of the first two layers: random weights double the rounding from layer to layer.

    Whole models in bfloat16 are checked by the answers of the trained one (`test_system.py`).
    """
    expected = expected_of(case)
    ids = expected["input_ids"].tolist()
    stage = solo_stage(GOLDEN / "k3", "bfloat16", ops=ops(), device=DEVICE)
    pools = Pools(stage, 1, len(ids))
    pools.prefill(pools.requests[0], ids, 16)
    for layer in (0, 1):
        state = pools.caches.states[layer][pools.requests[0].slot]
        check(state, expected[f"layer{layer}.kda_state"], torch.bfloat16, rtol=0.03)


@pytest.mark.parametrize("name, bound", KDA_CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_delta_rule_gives_the_reference_outputs_and_states(
    dtype: torch.dtype, name: str, bound: float | None
) -> None:
    """q, k, v in `dtype`; gates and states are float32 always."""
    kda_chunk = pytest.importorskip("k3_kernels.triton.kda_chunk")
    golden = load_file(GOLDEN / "k3/components.safetensors", str(DEVICE))
    c = {k.removeprefix(f"{name}."): v for k, v in golden.items() if k.startswith(f"{name}.")}
    q = kda_reference.l2_normalize(c["q"], 1e-6) * c["q"].shape[-1] ** -0.5
    k = kda_reference.l2_normalize(c["k"], 1e-6)
    raw = c["g_raw"] + c["dt_bias"].view(c["g_raw"].shape[-2:])
    g = kda_reference.gate(raw, c["A_log"].exp(), bound)
    beta = torch.sigmoid(c["beta_raw"])
    for b in range(len(q)):
        joint = (x[b].to(dtype).float() for x in (q, k, c["v"]))
        o, state = kda_chunk.delta(*joint, g[b], beta[b], c["h0"][b], lower_bound=bound)
        check(o, c["o"][b], dtype, 5e-5, 0.01)
        check(state, c["state"][b], dtype, 5e-5, 0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ledger_ranks_give_the_golden_tables_partials_and_union(dtype: torch.dtype) -> None:
    """Four context-parallel ranks in turn; their messages are merged as a rank merges what it received."""
    attention, g = ops().attention, load_file(GOLDEN / "helix/attn.safetensors", str(DEVICE))
    page_tokens, group, width = int(g["page_tokens"]), int(g["draft_len"]) + 1, 16
    valid = torch.ones(3, group, dtype=torch.bool, device=DEVICE)
    messages: list[Tensor] = []
    for rank in range(4):
        _, slot, bound = verify_tables(
            g["base"], g["block_table"], valid, page_tokens, int(g["cp_size"]), rank
        )
        assert torch.equal(slot, g["pool_slot"][rank].long())
        assert torch.equal(bound, g["kv_bound"][rank])
        pool = g["pool_before"][rank].to(dtype)
        attention.write(pool, slot, g["new_kv"].to(dtype))
        assert torch.equal(pool.nan_to_num(7.0), g["pool_after"][rank].to(dtype).nan_to_num(7.0))
        plan = attention.plan(g["block_table"], bound, group, int(bound.max()), page_tokens)
        o, lse = attention.decode(g["q"].to(dtype), pool, plan, float(g["scale"]), width)
        has_keys = bound > 0
        check(o[has_keys], g["partial_o"][rank][has_keys], dtype, 2e-5, 0.01)
        check(lse[has_keys], g["partial_lse"][rank][has_keys], dtype, 2e-5, 0.01)
        messages.append(attention.pack(o, lse, None))
    union = attention.merge_packed(torch.cat(messages), dtype)
    check(union, g["unsharded_o"], dtype, 2e-5, 0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drafting_rounds_give_the_recorded_states_logits_and_drafts(
    dtype: torch.dtype, kind: str
) -> None:
    """In float32 the drafts are the recorded ones; in bfloat16 close logits may change places."""
    recorded = Recorded(kind, ops().dense, DEVICE, dtype)
    for r in range(5):
        recorded.absorb(r)
        anchor, base = recorded.round(r, "anchor").long(), recorded.round(r, "start").long()
        context = recorded.read(r)
        hidden = recorded.drafter.hidden(context, anchor, base)
        check(hidden[0], recorded.round(r, "block_hidden"), dtype, 2e-4, 0.05)
        logits = recorded.drafter.head(hidden[0])
        check(logits, recorded.round(r, "base_logits"), dtype, 2e-4, 0.05)
        if dtype == torch.float32:
            drafts = recorded.drafter.propose(context, anchor, base)
            assert torch.equal(drafts[0].long(), recorded.round(r, "draft_tokens_greedy").long())
