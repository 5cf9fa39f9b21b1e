"""The numbers of a Kimi-K3 `text_config` that the training forward needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Dims:
    """The numbers of `text_config` the forward needs."""

    vocab: int
    hidden: int
    n_layers: int
    mla_layers: frozenset[int]
    block: int
    dense_width: int
    kda_heads: int
    kda_dim: int
    conv_width: int
    lower_bound: float
    mla_heads: int
    q_lora: int
    latent: int
    nope: int
    rope: int
    v_dim: int
    n_experts: int
    top_k: int
    expert_width: int
    expert_hidden: int
    n_shared: int
    n_dense: int
    situ: float
    situ_linear: float
    eps: float
    scaling: float

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Dims":
        """From a wrapper or text config.json; layer numbers become 0-based."""
        c = config.get("text_config", config)
        linear = c["linear_attn_config"]
        return Dims(
            c["vocab_size"], c["hidden_size"], c["num_hidden_layers"],
            frozenset(i - 1 for i in linear["full_attn_layers"]), c["attn_res_block_size"],
            c["intermediate_size"], linear["num_heads"], linear["head_dim"],
            linear["short_conv_kernel_size"], linear["gate_lower_bound"], c["num_attention_heads"],
            c["q_lora_rank"], c["kv_lora_rank"], c["qk_nope_head_dim"], c["qk_rope_head_dim"],
            c["v_head_dim"], c["num_experts"], c["num_experts_per_token"], c["moe_intermediate_size"],
            c["routed_expert_hidden_size"], c["num_shared_experts"], c["first_k_dense_replace"],
            c["activation_situ_beta"], c["activation_situ_linear_beta"], c["rms_norm_eps"],
            c["routed_scaling_factor"],
        )  # fmt: skip

    @property
    def n_blocks(self) -> int:
        """Residual blocks."""
        return -(-self.n_layers // self.block)
