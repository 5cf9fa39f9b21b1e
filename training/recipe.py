"""All numbers of a run in one tree: model, target schedule, drafter schedule. `--smoke` shrinks, never reroutes."""

from dataclasses import dataclass, field, replace
from typing import Any

from k3.bench.suites import NAMES
from training.data.mixture import Mixture

_QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def model_config() -> dict[str, Any]:
    """config.json of k3-mini: every mechanism of K3 on, 19.55 M parameters."""
    special = {
        "bos_token_id": 3840,
        "eos_token_id": 3842,
        "pad_token_id": 4095,
        "dtype": "bfloat16",
    }
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 13,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "num_heads": 8,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11],
            "full_attn_layers": [4, 8, 12, 13],
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "attn_res_block_size": 4,
        "intermediate_size": 768,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "moe_intermediate_size": 128,
        "routed_expert_hidden_size": 128,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "max_position_embeddings": 16384,
        "num_expert_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "use_cache": True,
        "initializer_range": 0.02,
        "quantization_config": _QUANTIZATION,
        **special,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
        **special,
        "tie_word_embeddings": False,
    }


@dataclass(frozen=True, slots=True)
class TargetRecipe:
    """Schedule of the target. Rates are the peaks; `flat` is the share of steps before the linear decay."""

    n_tokens: int = 131_072
    n_steps: int = 1_800
    warmup: int = 60
    flat: float = 0.5
    final: float = 0.02
    lr_muon: float = 5e-3
    lr_adam: float = 4e-3
    balance: float = 2e-3
    prompt_weight: float = 0.1
    seed: int = 20_261
    n_workers: int = 12
    checkpoint_every: int = 400
    mixture: Mixture = field(default_factory=Mixture)

    def factor(self, step: int) -> float:
        """Learning rate relative to the peak."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = step / self.n_steps
        if progress <= self.flat:
            return 1.0
        return 1.0 - (1.0 - self.final) * (progress - self.flat) / (1.0 - self.flat)


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    """Data and schedule of a drafter. `buckets`: (rows, documents per batch, anchors, share of steps)."""

    n_prompts: int = 40_960
    n_long: int = 1_024
    n_middle: int = 4_096
    generate_batch: int = 2_048
    max_new: int = 256
    buckets: tuple[tuple[int, int, int, float], ...] = (
        (256, 256, 16, 0.72),
        (1280, 64, 32, 0.20),
        (4608, 16, 32, 0.08),
    )
    n_steps: int = 3_000
    warmup: int = 60
    lr_muon: float = 4e-3
    lr_adam: float = 2e-3
    gamma: float = 4.0
    seed: int = 7_411


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole run."""

    target: TargetRecipe = field(default_factory=TargetRecipe)
    drafter: DrafterRecipe = field(default_factory=DrafterRecipe)
    suites: tuple[str, ...] = NAMES
    eval_items: int = 0
    rollout_items: int = 100
    answer_cap: int = 176
    samples: tuple[tuple[str, int], ...] = (
        ("arith_seen", 3), ("arith_forms", 1), ("arith_skeletons", 1), ("copy", 1), ("lists", 2),
        ("tools", 1), ("chat", 1), ("passkey_1k", 1), ("facts16_1k", 1),
    )  # fmt: skip
    tokenizer_samples: int = 12_000


def smoke() -> Recipe:
    """The same phases on a CPU in under 90 s: a handful of steps on short documents."""
    mixture = Mixture(
        arithmetic=0.7,
        recall=0.0,
        late_recall=0.0,
        short_recall=0.0,
        tools=0.0,
        stages=((1.0, 256),),
    )
    return Recipe(
        target=replace(
            TargetRecipe(), n_tokens=320, n_steps=2, warmup=1, n_workers=1, checkpoint_every=1,
            mixture=mixture,
        ),
        drafter=replace(
            DrafterRecipe(), n_prompts=2, n_long=0, n_middle=0, generate_batch=4, max_new=12,
            buckets=((768, 2, 2, 1.0),), n_steps=2, warmup=1,
        ),
        suites=("arith_seen", "chat"),
        eval_items=1,
        rollout_items=1,
        answer_cap=12,
        samples=(("arith_seen", 1),),
        tokenizer_samples=200,
    )  # fmt: skip
