"""The whole model against third-party reference outputs: logits, hidden states, states, expert choice.

Tolerances are those of the README beside the vectors: logits 1e-4, hidden states and states 1e-3. The vectors are a
float32 run: at the ill-conditioned token of case2 their logits lie 8.3e-5 from the float64 model's, so another float32
run may be twice the tolerance from them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3.model.k3 import Stage
from k3.model.moe import Moe
from tests.compare import assert_close
from tests.golden.k3.twin import mxfp4_tensors
from tests.model_runner import Pools, solo_stage

HERE = Path(__file__).parent
LOGITS, STATES = 1e-4, 1e-3
CASES = ("case0", "case1", "case2")
N_LAYERS = 9


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(HERE / "cases.safetensors")


@pytest.fixture(scope="module", params=["float32", "float64"])
def stage(request: pytest.FixtureRequest) -> Stage:
    taps = (-1, *range(N_LAYERS))
    return solo_stage(HERE, request.param, taps=taps)


def _case(golden: dict[str, Tensor], case: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{case}."): tensor
        for name, tensor in golden.items()
        if name.startswith(f"{case}.")
    }


@pytest.mark.parametrize("chunk", [1, 5, 16, 64, 1000])
@pytest.mark.parametrize("case", CASES)
def test_prefill_gives_the_reference_logits_for_every_chunk_size(
    stage: Stage, golden: dict[str, Tensor], case: str, chunk: int
) -> None:
    expected = _case(golden, case)
    ids = expected["input_ids"].tolist()
    pools = Pools(stage, 1, len(ids) + 1)
    logits = pools.prefill(pools.requests[0], ids, chunk)
    tolerance = LOGITS if stage.dtype == torch.float64 else 2 * LOGITS
    assert_close(logits, expected["logits"], tolerance, f"{case} logits, chunk {chunk}")


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_cached_decode_gives_the_reference_logits_and_end_states(
    stage: Stage, golden: dict[str, Tensor], case: str, columns: int
) -> None:
    expected = _case(golden, case)
    ids, decode = expected["input_ids"].tolist(), expected["decode_ids"].tolist()
    pools = Pools(stage, 1, len(ids) + len(decode), columns=columns)
    request = pools.requests[0]
    logits = pools.prefill(request, ids, 16)
    assert int(logits[-1].argmax()) == decode[0]
    rows = [pools.verify([(request, [token])], [0])[0] for token in decode]
    got = torch.cat(rows)
    assert_close(got, expected["decode_logits"], LOGITS, f"{case} decode logits")
    assert got[:-1].argmax(-1).tolist() == decode[1:]
    _check_states(pools, expected, "_end")


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_bank_and_final_norm_match_the_reference(
    stage: Stage, golden: dict[str, Tensor], case: str
) -> None:
    expected = _case(golden, case)
    ids = expected["input_ids"].tolist()
    pools = Pools(stage, 1, len(ids))
    output = pools.chunk([(pools.requests[0], ids)])
    assert_close(output.taps_TXD[:, 0], expected["embed"], 0, f"{case} embedding")
    for layer in range(N_LAYERS):
        what = f"{case} layer {layer}"
        assert_close(output.taps_TXD[:, layer + 1], expected[f"layer{layer}.out"], STATES, what)
    bank = output.frame.data_TUH[:, 1 : 1 + output.frame.layout.bank]
    assert_close(bank, expected["block_residual"], STATES, f"{case} bank")
    assert_close(stage.hidden(output.frame), expected["final_norm"], STATES, f"{case} final norm")


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("case", CASES)
def test_caches_hold_the_reference_latents_and_states(
    stage: Stage, golden: dict[str, Tensor], case: str, chunk: int
) -> None:
    expected = _case(golden, case)
    ids = expected["input_ids"].tolist()
    pools = Pools(stage, 1, len(ids))
    request = pools.requests[0]
    pools.prefill(request, ids, chunk)
    _check_states(pools, expected, "")
    for layer, latents in pools.caches.latents.items():
        rows = latents[request.pages.long()].flatten(0, 1)[: len(ids)]
        assert_close(rows, expected[f"layer{layer}.mla_latent"], STATES, f"{case} latent {layer}")


def _check_states(pools: Pools, expected: dict[str, Tensor], suffix: str) -> None:
    """Golden windows hold one more column (the oldest, never read) and channels head-major."""
    slot = pools.requests[0].slot
    for layer, states in pools.caches.states.items():
        state = states[slot * pools.caches.columns]
        assert_close(state, expected[f"layer{layer}.kda_state{suffix}"], STATES, f"state {layer}")
        window = pools.caches.windows[layer][slot].transpose(0, 1).flatten(1, 2)
        reference = expected[f"layer{layer}.conv_state{suffix}"][..., 1:]
        assert_close(window, reference, STATES, f"window {layer}")


@pytest.mark.parametrize("case", CASES)
def test_every_token_chooses_the_reference_experts(
    stage: Stage, golden: dict[str, Tensor], case: str
) -> None:
    expected = _case(golden, case)
    ids = expected["input_ids"].tolist()
    pools = Pools(stage, 1, len(ids))
    with _recorded_routes(stage) as routes:
        pools.chunk([(pools.requests[0], ids)])
    assert routes, "the model has MoE layers"
    for layer, (chosen, weight) in routes.items():
        order = chosen.argsort(-1)
        assert torch.equal(chosen.gather(-1, order), expected[f"layer{layer}.topk_ids"])
        weights = weight.gather(-1, order)
        assert_close(weights, expected[f"layer{layer}.topk_weights"], STATES, f"weights {layer}")


class _recorded_routes:
    """Keeps what each MoE layer's router answered, by layer."""

    def __init__(self, stage: Stage) -> None:
        self._layers = [
            (layer.index, layer.ffn) for layer in stage.layers if isinstance(layer.ffn, Moe)
        ]
        self._blocks = [moe.block for _, moe in self._layers]
        self.routes: dict[int, tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> dict[int, tuple[Tensor, Tensor]]:
        for index, moe in self._layers:
            moe.ops = _Recording(moe.ops, self.routes, index)
            moe.block = None  # which would not ask
        return self.routes

    def __exit__(self, *_: object) -> None:
        for (_, moe), block in zip(self._layers, self._blocks, strict=True):
            assert isinstance(moe.ops, _Recording)
            moe.ops, moe.block = moe.ops.real, block


class _Recording:
    """MoE operations that remember their routing."""

    def __init__(self, real, routes: dict[int, tuple[Tensor, Tensor]], index: int) -> None:
        self.real, self._routes, self._index = real, routes, index
        self.experts = real.experts

    def route(self, x_TD: Tensor, gate_ED: Tensor, bias_E: Tensor, rule) -> tuple[Tensor, Tensor]:
        answer = self.real.route(x_TD, gate_ED, bias_E, rule)
        self._routes[self._index] = answer
        return answer


@pytest.mark.parametrize("moe_weights", ["dequant", "packed"])
def test_mxfp4_checkpoint_gives_the_reference_logits_and_hidden_states(
    tmp_path: Path, moe_weights: str
) -> None:
    shutil.copy(HERE / "config-mxfp4.json", tmp_path / "config.json")
    save_file(mxfp4_tensors(), tmp_path / "model.safetensors")
    expected = _case(load_file(HERE / "cases-mxfp4.safetensors"), "mxfp4")
    packed = solo_stage(tmp_path, "float32", moe_weights, taps=tuple(range(N_LAYERS)))
    ids = expected["input_ids"].tolist()
    pools = Pools(packed, 1, len(ids))
    output = pools.chunk([(pools.requests[0], ids)])
    assert_close(pools.logits(output), expected["logits"], LOGITS, "logits")
    for layer in range(N_LAYERS):
        out = expected[f"layer{layer}.out"]
        assert_close(output.taps_TXD[:, layer], out, STATES, f"layer {layer}")
