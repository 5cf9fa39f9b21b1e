"""Laws of the model: any chunking, batching, splitting or speculation gives the same numbers.

All in float64, where two orders of the same sums differ by about 1e-13.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k3.model.batch import ChunkBatch, VerifyBatch
from k3.model.k3 import Stage
from k3.model.registry import build_stage, open_stage
from k3.model.spec import K3Spec
from k3.model.weights import MemorySource
from k3.parallel.collectives import solo_groups
from k3.parallel.mesh import Mesh
from tests.compare import assert_close
from tests.model_runner import CPU, OPS, Pools, solo_stage
from tests.random_weights import random_tensors

NANO = Path(__file__).parents[2] / "golden/k3"
ATOL = 1e-9


def _ids(n: int, seed: int) -> list[int]:
    return torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def stage() -> Stage:
    return solo_stage(NANO, "float64")


def _whole(stage: Stage, ids: list[int]) -> Tensor:
    pools = Pools(stage, 1, len(ids))
    return pools.prefill(pools.requests[0], ids, len(ids))


@pytest.mark.parametrize("page_tokens", [1, 4, 32])
def test_requests_in_one_step_do_not_see_each_other(stage: Stage, page_tokens: int) -> None:
    prompts = [_ids(n, n) for n in (1, 3, 17, 33)]
    pools = Pools(stage, 4, 40, page_tokens)
    first = pools.chunk(
        [(r, p[: len(p) // 2 + 1]) for r, p in zip(pools.requests, prompts, strict=True)]
    )
    assert bool(pools.logits(first).isfinite().all())
    rest = [
        (r, p[r.length :])
        for r, p in zip(pools.requests, prompts, strict=True)
        if len(p) > r.length
    ]
    output = pools.logits(pools.chunk(rest))
    at = 0
    for _, tokens in rest:
        at += len(tokens)
        prompt = next(p for p in prompts if p[-len(tokens) :] == tokens)
        assert_close(output[at - 1], _whole(stage, prompt)[-1], ATOL, f"prompt of {len(prompt)}")


def test_a_decode_batch_gives_what_each_row_gives_alone(stage: Stage) -> None:
    prompts = [_ids(n, n) for n in (1, 3, 4, 5, 63)]
    pools = Pools(stage, 5, 80)
    for request, prompt in zip(pools.requests, prompts, strict=True):
        pools.prefill(request, prompt, 16)
    following = _ids(5, 99)
    got = pools.verify([(r, [t]) for r, t in zip(pools.requests, following, strict=True)], [0] * 5)
    for row, prompt, token in zip(got, prompts, following, strict=True):
        assert_close(row[0], _whole(stage, [*prompt, token])[-1], ATOL, f"row after {len(prompt)}")


@pytest.mark.parametrize(
    ("group", "form"), [*((g, "columns") for g in range(1, 9)), (1, "records"), (7, "records")]
)
@pytest.mark.dspark
def test_verify_groups_equal_sequential_decoding_whatever_is_accepted(
    stage: Stage, group: int, form: str
) -> None:
    """Two rows, several steps; step s accepts a changing number of drafts, the rest are wrong."""
    k = group - 1
    truth = [_ids(60, 7), _ids(60, 8)]
    expected = [_whole(stage, ids) for ids in truth]
    pools = Pools(stage, 2, 90, **{form: group})
    lengths = [5, 9]
    for request, ids, n in zip(pools.requests, truth, lengths, strict=True):
        pools.prefill(request, ids[:n], 4)
    for step in range(5):
        accepted = [(step * 3 + row * 2 + 1) % group for row in range(2)]
        groups = []
        for request, ids, a in zip(pools.requests, truth, accepted, strict=True):
            base = request.length
            wrong = [(t + 1) % 512 for t in ids[base + a + 1 : base + group]]
            groups.append((request, [*ids[base : base + a + 1], *wrong]))
        bases = [r.length for r in pools.requests]
        logits = pools.verify(groups, accepted)
        for row, (base, a) in enumerate(zip(bases, accepted, strict=True)):
            what = f"step {step} row {row}, {a} of {k} accepted"
            assert_close(logits[row, : a + 1], expected[row][base : base + a + 1], ATOL, what)


@pytest.mark.parametrize("form", ["columns", "records"])
@pytest.mark.dspark
def test_closing_the_drafts_keeps_the_same_state_form(stage: Stage, form: str) -> None:
    """Steps of a wide group with padding after the anchor equal plain decoding."""
    ids = _ids(20, 3)
    pools = Pools(stage, 1, 40, **{form: 4})
    request = pools.requests[0]
    pools.prefill(request, ids[:7], 7)
    expected = _whole(stage, ids)
    for base in range(7, 20):
        batch = pools.verify_batch([(request, [ids[base], 0, 0, 0])])
        slot, bound = batch.slot_T.clone(), batch.bound_T.clone()
        slot[1:], bound[1:] = -1, 0
        closed = VerifyBatch(
            batch.token_ids_T,
            batch.page_table_BW,
            slot,
            bound,
            batch.state_slots_B,
            batch.read_column_B,
            4,
            batch.max_bound,
        )
        output = stage.forward(None, pools.caches, closed)
        request.length, request.read_column = base + 1, 0
        assert_close(pools.logits(output)[0], expected[base], ATOL, f"base {base}")


@pytest.mark.parametrize("form", ["columns", "records"])
@pytest.mark.dspark
def test_rejected_drafts_are_out_of_reach(stage: Stage, form: str) -> None:
    """Whatever a rejected draft left in pages, states, records and windows may be NaN: nothing changes."""
    ids = _ids(16, 11)
    results = []
    for poison in (False, True):
        pools = Pools(stage, 1, 40, **{form: 4})
        request = pools.requests[0]
        pools.prefill(request, ids[:9], 5)
        pools.verify([(request, [ids[9], ids[10], 3, 4])], [1])
        if poison:
            _poison_rejected(pools, accepted=1)
        results.append(pools.verify([(request, ids[11:15])], [3]))
    assert torch.equal(results[0], results[1])


def _poison_rejected(pools: Pools, accepted: int) -> None:
    request, nan = pools.requests[0], float("nan")
    for position in range(request.length, 40):
        page = request.pages[position // pools.page_tokens].long()
        for latents in pools.caches.latents.values():
            latents[page, position % pools.page_tokens] = nan
    for layer, states in pools.caches.states.items():
        if layer in pools.caches.records:
            pools.caches.records[layer][request.slot, :, :, accepted + 1 :] = nan
        else:
            columns = states[request.slot * 4 : request.slot * 4 + 4]
            columns[:accepted] = nan
            columns[accepted + 1 :] = nan
        pools.caches.windows[layer][request.slot][..., :accepted] = nan
        pools.caches.tails[layer][request.slot][..., accepted:, :] = nan


@pytest.mark.prefill
def test_forking_from_a_read_slot_leaves_it_untouched(stage: Stage) -> None:
    ids = _ids(24, 5)
    pools = Pools(stage, 2, 24)
    first, second = pools.requests
    pools.prefill(first, ids[:12], 12)
    kept = {i: s[first.slot].clone() for i, s in pools.caches.states.items()}
    # the second request shares the pages of the prefix and continues from the first one's state
    second.pages[:3] = first.pages[:3]
    second.length = 12
    batch = pools.chunk_batch([(second, ids[12:])])
    fork = ChunkBatch(
        batch.token_ids_T,
        batch.cu_lens,
        batch.starts,
        batch.page_table_RW,
        batch.slot_T,
        (first.slot,),
        (second.slot,),
    )
    logits = pools.logits(stage.forward(None, pools.caches, fork))
    assert_close(logits, _whole(stage, ids)[12:], ATOL, "forked continuation")
    for layer, state in kept.items():
        assert torch.equal(pools.caches.states[layer][first.slot], state)


@pytest.mark.parametrize("tap_stream", ["prefix", "mixture"])
@pytest.mark.parametrize("pp", [2, 3, 9])
@pytest.mark.prefill
def test_split_model_is_bitwise_equal_to_the_whole_one(pp: int, tap_stream: str) -> None:
    taps = (8, -1, 2, 4, 7)
    whole = solo_stage(NANO, "float32", taps=taps, tap_stream=tap_stream)
    ids = _ids(19, 1)
    pools = Pools(whole, 1, len(ids))
    expected = pools.chunk([(pools.requests[0], ids)])
    mesh = Mesh(pp=pp)
    frame = None
    for rank in range(pp):
        stage = open_stage(
            NANO,
            mesh.place(rank),
            solo_groups(),
            OPS,
            dtype="float32",
            device=CPU,
            taps=taps,
            tap_stream=tap_stream,
        )
        own = Pools(stage, 1, len(ids))
        batch = own.chunk_batch([(own.requests[0], ids)])
        frame = stage.forward(frame, own.caches, batch).frame
        assert bool(frame.data_TUH.isfinite().all())
    assert frame is not None
    assert torch.equal(frame.data_TUH, expected.frame.data_TUH)
    assert torch.equal(stage.hidden(frame), whole.hidden(expected.frame))


@pytest.mark.prefill
def test_mixture_tap_is_what_the_next_layer_reads() -> None:
    ids = _ids(5, 2)
    stage = solo_stage(NANO, "float64", taps=(2, 8), tap_stream="mixture")
    plain = solo_stage(NANO, "float64", taps=(2,))
    pools, other = Pools(stage, 1, 5), Pools(plain, 1, 5)
    output = pools.chunk([(pools.requests[0], ids)])
    frame = other.chunk([(other.requests[0], ids)]).frame
    next_layer = stage.layers[3]
    assert next_layer.attention_site is not None
    candidates = torch.stack((frame.tap_TH(2), frame.bank_TH(0)), 1)
    expected = next_layer.attention_site.rows(candidates)
    assert_close(output.taps_TXD[:, 0], expected, ATOL, "mixture after layer 2")
    last = stage.hidden(output.frame)
    norm = output.taps_TXD[:, 1].square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    assert_close(
        output.taps_TXD[:, 1] * norm * stage.final_norm, last, ATOL, "after the last layer"
    )


def _variant(**changes: Any) -> K3Spec:
    config = copy.deepcopy(json.loads((NANO / "config.json").read_text()))
    linear = changes.pop("linear", {})
    config["text_config"].update(changes)
    config["text_config"]["linear_attn_config"].update(linear)
    return K3Spec.from_config(config)


VARIANTS = {
    "plain residuals": {"attn_res_block_size": None},
    "unaligned blocks": {"attn_res_block_size": 5},
    "low-rank gate": {"linear": {"use_full_rank_gate": False}},
    "softplus gate": {"linear": {"gate_lower_bound": None}},
    "no output gate": {"mla_use_output_gate": False},
    "no latent": {"routed_expert_hidden_size": None},
    "no latent norm": {"latent_moe_use_norm": False},
    "one query projection": {"q_lora_rank": None},
    "softmax router": {"moe_router_activation_func": "softmax", "moe_renormalize": False},
    "two dense layers, every other layer sparse": {"first_k_dense_replace": 2, "moe_layer_freq": 2},
    "grouped experts": {"num_expert_group": 4, "topk_group": 2},
    "no shared experts": {"num_shared_experts": 0},
    "unclipped up branch": {"activation_situ_linear_beta": None, "activation_situ_beta": None},
    "tied head": {"tie_word_embeddings": True},
    "other heads": {"num_attention_heads": 6, "num_key_value_heads": 6, "linear": {"num_heads": 3}},
    "wider convolution": {"linear": {"short_conv_kernel_size": 6}},
    "only full attention": {"linear": {"kda_layers": [], "full_attn_layers": list(range(1, 10))}},
    "only linear attention": {"linear": {"kda_layers": list(range(1, 10)), "full_attn_layers": []}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_switch_gives_the_same_numbers_cached_and_uncached(name: str) -> None:
    spec = _variant(**copy.deepcopy(VARIANTS[name]))
    stage = build_stage(spec, MemorySource(random_tensors(spec, 3)), OPS, dtype="float64")
    ids = _ids(21, 4)
    expected = _whole(stage, ids)
    pools = Pools(stage, 1, 40, columns=3)
    request = pools.requests[0]
    got = [pools.prefill(request, ids[:13], 5)]
    for base in (13, 16):
        got.append(pools.verify([(request, ids[base : base + 3])], [2])[0])
    got.append(pools.verify([(request, [*ids[19:21], 0])], [1])[0, :2])
    assert_close(torch.cat(got), expected, ATOL, name)


def test_bfloat16_stays_near_float32_on_a_trained_model() -> None:
    """Random weights would not do: there a rounding flips an expert and everything after it."""
    folder = Path(__file__).parents[3] / "k3/assets/tiny"
    sample = json.loads((folder / "samples.json").read_text())[0]
    ids = [*sample["prompt_ids"], *sample["answer_ids"]]
    exact = _whole(solo_stage(folder, "float32"), ids)
    pools = Pools(solo_stage(folder, "bfloat16"), 1, len(ids), page_tokens=32, columns=2)
    request = pools.requests[0]
    prompt = len(sample["prompt_ids"])
    rows = [pools.prefill(request, ids[:prompt], 16)]
    for base in range(prompt, len(ids) - 1, 2):
        rows.append(pools.verify([(request, ids[base : base + 2])], [1])[0])
    got = torch.cat(rows)
    assert got.dtype == torch.float32
    assert got[prompt - 1 : -1].argmax(-1).tolist() == sample["answer_ids"][: len(got) - prompt]
    error = (got - exact[: len(got)]).square().mean().sqrt()
    assert float(error / exact.square().mean().sqrt()) < 0.03
