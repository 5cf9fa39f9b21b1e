"""Five drafting rounds of every drafter kind against the recorded ones, through a ring that holds everything.

Tolerance: the README's 1e-4 absolute in float32, exact for tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from k3_kernels.api import DenseOps
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding, linear

from k3.model.draft_attention import Rotation
from k3.model.draft_ring import DraftRing
from k3.model.dspark import Drafter, draft_weights
from k3.model.dspark_spec import DraftSpec, ring_places
from k3.model.weights import MemorySource
from k3.parallel.collectives import SoloCollectives
from k3.parallel.mesh import WHOLE
from tests.compare import assert_close
from tests.model_runner import CPU, OPS

pytestmark = pytest.mark.dspark

HERE = Path(__file__).parent
KINDS = ("gqa", "gqa_yarn", "gqa_gated", "gqa_rnn", "mla")
ATOL = 1e-4
PAGE, WINDOW, SLOT = 4, 64, 1


def dialect(config: dict[str, Any]) -> dict[str, Any]:
    """The recorded configuration as the checkpoint of its flavour would spell it."""
    common = {"hidden_act": "silu", "rms_norm_eps": config["rms_norm_eps"]}
    inner = {
        "target_layer_ids": config["target_layer_ids"],
        "mask_token_id": config["mask_token_id"],
        "markov_rank": config["markov_rank"],
        "markov_head_type": config.get("markov_head_type", "vanilla"),
        "enable_confidence_head": True,
    }
    if config["flavour"] == "mla":
        return config | common | inner | {"model_type": "k3_dspark"}
    return config | common | {"model_type": "qwen3", "dflash_config": inner}


class Recorded:
    """One file: its tensors, and our drafter with its weights."""

    def __init__(
        self,
        kind: str,
        dense: DenseOps = OPS.dense,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """dense: operations of the device."""
        config = json.loads((HERE / f"drafter_{kind}.config.json").read_text())
        tensors = load_file(HERE / f"drafter_{kind}.safetensors", str(device))
        self.tensors, self.dtype, self.device = tensors, dtype, device
        weights = {
            name.removeprefix("weights."): tensor
            for name, tensor in self.tensors.items()
            if name.startswith("weights.")
        }
        self.spec = DraftSpec.from_config(dialect(config))
        loaded = draft_weights(
            self.spec,
            MemorySource(weights),
            context_only=False,
            dtype=str(dtype).removeprefix("torch."),
            device=device,
            confidence=True,
        )
        self.drafter = Drafter(
            self.spec,
            WHOLE,
            SoloCollectives(),
            loaded,
            draft_tokens=7,
            embed=lambda ids: embedding(ids, weights["embed_tokens.weight"].to(dtype)),
            head=lambda h: linear(h.float(), weights["lm_head.weight"]),
            ops=dense,
            confidence=True,
        )
        loaded.finish()
        places = ring_places(WINDOW, 8, PAGE)
        shape = (2 * places, *self.spec.place_shape(PAGE, 1))
        pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.ring = DraftRing(pool, places, WINDOW)

    def round(self, r: int, name: str) -> Tensor:
        return self.tensors[f"round{r}.{name}"]

    def absorb(self, r: int) -> None:
        """Write the context rows that became committed before round `r`."""
        rows = self.round(r, "new_context_taps").to(self.dtype)
        taps = rows.unflatten(1, (len(self.spec.taps), -1))
        end = int(self.round(r, "start"))
        positions = torch.arange(end - len(taps), end, device=self.device)
        rows = self.drafter.context(taps, positions)
        keep = torch.ones_like(positions, dtype=torch.bool)
        self.ring.write(rows, torch.full_like(positions, SLOT), positions, keep)

    def read(self, r: int):
        base = self.round(r, "start").long()
        slot = torch.tensor([SLOT], device=self.device)
        return self.ring.read(slot, torch.zeros_like(slot), base, int(base))


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_give_the_recorded_hidden_states_logits_and_drafts(kind):
    recorded = Recorded(kind)
    drafter = recorded.drafter
    for r in range(5):
        recorded.absorb(r)
        anchor, base = recorded.round(r, "anchor").long(), recorded.round(r, "start").long()
        context = recorded.read(r)
        hidden = drafter.hidden(context, anchor, base)
        assert_close(hidden[0], recorded.round(r, "block_hidden"), ATOL, f"round {r} hidden")
        logits = drafter.head(hidden[0])
        assert_close(logits, recorded.round(r, "base_logits"), ATOL, f"round {r} logits")
        drafts = drafter.propose(context, anchor, base)
        greedy = recorded.round(r, "draft_tokens_greedy").long()
        assert drafts[0].tolist() == greedy.tolist()
        previous = torch.cat((anchor, greedy[:-1]))
        confidence = drafter.confidence_logits(hidden, previous[None])[0]
        assert_close(confidence, recorded.round(r, "confidence_logits_greedy"), ATOL, "confidence")


@pytest.mark.parametrize("kind", KINDS)
def test_the_sequential_head_corrects_each_slot_by_the_token_before_it(kind):
    recorded = Recorded(kind)
    for r in range(5):
        cases = [("draft_tokens_greedy", "markov_logits_greedy")]
        if kind != "mla":
            cases.append(("sampled_tokens_T0.8", "sampled_markov_logits_T0.8"))
        for tokens, logits in cases:
            hidden = recorded.round(r, "block_hidden")
            previous = torch.cat(
                (recorded.round(r, "anchor"), recorded.round(r, tokens)[:-1])
            ).long()
            state = recorded.drafter.sequential.start(1)
            for i in range(7):
                bias, state = recorded.drafter.sequential(
                    previous[i : i + 1], hidden[i : i + 1], state
                )
                got = recorded.round(r, "base_logits")[i] + bias[0]
                assert_close(got, recorded.round(r, logits)[i], ATOL, f"round {r} slot {i}")


@pytest.mark.parametrize("kind", KINDS)
def test_context_rows_are_normalised_and_rotated_at_absolute_positions(kind):
    recorded = Recorded(kind)
    for r in range(5):
        recorded.absorb(r)
    n = int(recorded.round(4, "start"))
    rows = recorded.ring.pool.movedim(-2, 1)[recorded.ring.places :].flatten(0, 1)[:n]
    positions = torch.arange(n)
    if kind == "mla":
        expected = recorded.tensors["final.latent_prerope"][:, :n].clone()
        turn = Rotation(recorded.spec.rope, torch.float32, torch.device("cpu")).at(positions)
        rank = recorded.spec.attention.kv_lora_rank
        expected[..., rank:] = torch.stack([turn(x[:, rank:]) for x in expected])
        assert_close(rows.movedim(1, 0), expected, ATOL, "latent rows")
    else:
        k, v = rows[..., 0, :], rows[..., 1, :]  # [n, H, L, dim]
        assert_close(k.permute(2, 1, 0, 3), recorded.tensors["final.ctx_k"][:, :, :n], ATOL, "keys")
        assert_close(
            v.permute(2, 1, 0, 3), recorded.tensors["final.ctx_v"][:, :, :n], ATOL, "values"
        )


def test_yarn_gives_the_recorded_frequencies_and_scales():
    recorded = Recorded("mla")
    frequencies = torch.tensor(recorded.spec.rope.frequencies())
    assert_close(frequencies, recorded.tensors["rope.inv_freq"], 1e-7, "inverse frequencies")
    assert recorded.spec.rope.amplitude == pytest.approx(
        float(recorded.tensors["rope.attention_scaling"])
    )
    assert recorded.spec.scale == pytest.approx(float(recorded.tensors["rope.softmax_scale"]))


def test_a_row_that_was_never_written_is_never_read():
    """Everything outside the window or beyond the anchor stays NaN in the pool and does not show."""
    recorded = Recorded("mla")
    recorded.absorb(0)
    base = recorded.round(0, "start").long()
    context = recorded.ring.read(torch.tensor([SLOT]), torch.tensor([5]), base, int(base) + 30)
    assert int(context.seen_BN.sum()) == int(base) - 5
    assert not context.rows.isnan().any()
