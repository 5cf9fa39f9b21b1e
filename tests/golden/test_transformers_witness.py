"""transformers' own Kimi-Linear agrees with this model on everything the two share.

K3's extra switches are off: no residual blocks, no gates on MLA, no latent experts, softplus decay, low-rank
output gate. The activation is aligned without touching either side: SiTU with no clip on the up branch
and a soft-clip constant far above any activation is SiLU(gate) * up. Both read the same checkpoint
file, so the spelling of tensor names is witnessed too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from k3.model.registry import build_stage
from k3.model.spec import K3Spec
from k3.model.weights import open_folder
from tests.compare import assert_close
from tests.model_runner import OPS, Pools
from tests.random_weights import random_tensors

NANO = Path(__file__).parent / "k3/config.json"
SILU_BETA = 1e4


def _text_config(q_lora_rank: int | None) -> dict[str, Any]:
    text = json.loads(NANO.read_text())["text_config"]
    text["linear_attn_config"] |= {"gate_lower_bound": None, "use_full_rank_gate": False}
    return text | {
        "attn_res_block_size": None,
        "mla_use_output_gate": False,
        "routed_expert_hidden_size": None,
        "activation_situ_beta": SILU_BETA,
        "activation_situ_linear_beta": None,
        "q_lora_rank": q_lora_rank,
        "num_expert_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.446,
    }


def _witness(folder: Path, text: dict[str, Any]) -> Any:
    from transformers import KimiLinearForCausalLM

    (folder / "config.json").write_text(json.dumps(text | {"hidden_act": "silu"}))
    model, report = KimiLinearForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("q_lora_rank", [None, 48])
def test_logits_agree_with_transformers_kimi_linear(
    tmp_path: Path, q_lora_rank: int | None
) -> None:
    text = _text_config(q_lora_rank)
    spec = K3Spec.from_config(text)
    tensors = random_tensors(spec, seed=11)
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensors[name] = tensor[: spec.kda.n_heads].view(1, 1, -1, 1).clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = torch.randint(3, 512, (75,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected: Tensor = _witness(tmp_path, text)(ids[None]).logits[0]
    stage = build_stage(spec, open_folder(tmp_path), OPS, dtype="float32")
    pools = Pools(stage, 1, len(ids))
    request = pools.requests[0]
    rows = [pools.prefill(request, ids[:70].tolist(), 16)]
    rows += [pools.verify([(request, [int(token)])], [0])[0] for token in ids[70:]]
    assert_close(torch.cat(rows), expected, 2e-4, "logits")
