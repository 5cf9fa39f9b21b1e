"""Shapes and initial values of the target's parameters; which optimizer owns which.

Initialisation: linears fan_in^-0.5, output projections half of it, AttnRes projections zero, KDA decays spread
log-uniformly so that memories from 1 to 1,000 tokens exist at the first step.
"""

import math

import torch
from torch import Tensor

from training.dims import Dims

_HALVED = ("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight", "f_b_proj.weight")
_FP32 = ("norm.weight", "conv1d.weight", "A_log", "dt_bias", "res_proj.weight", ".gate.weight")


def is_bf16(name: str) -> bool:
    """Whether the forward uses a bf16 copy (matrices) instead of the fp32 master (vectors, conv, router, tables)."""
    return is_muon(name)


def is_muon(name: str) -> bool:
    """Matrices inside layers; conv, router, res_proj, vectors, embedding and head are AdamW's."""
    if not name.startswith("model.layers.") or name.endswith("e_score_correction_bias"):
        return False
    return not name.endswith(_FP32)


def shapes(d: Dims) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model, experts stacked."""
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (d.vocab, d.hidden),
        "lm_head.weight": (d.vocab, d.hidden),
        "model.norm.weight": (d.hidden,),
        "model.output_attn_res_norm.weight": (d.hidden,),
        "model.output_attn_res_proj.weight": (1, d.hidden),
    }
    for i in range(d.n_layers):
        layer = _mla_shapes(d) if i in d.mla_layers else _kda_shapes(d)
        layer |= _dense_shapes(d) if i < d.n_dense else _moe_shapes(d)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            layer[f"{norm}.weight"] = (d.hidden,)
        for res in ("self_attention_res", "mlp_res"):
            layer[f"{res}_norm.weight"] = (d.hidden,)
            layer[f"{res}_proj.weight"] = (1, d.hidden)
        out |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return out


def _kda_shapes(d: Dims) -> dict[str, tuple[int, ...]]:
    width = d.kda_heads * d.kda_dim
    out: dict[str, tuple[int, ...]] = {
        f"self_attn.{n}_proj.weight": (width, d.hidden) for n in "qkvg"
    }
    out |= {f"self_attn.{n}_conv1d.weight": (width, 1, d.conv_width) for n in "qkv"}
    return out | {
        "self_attn.A_log": (d.kda_heads,),
        "self_attn.dt_bias": (width,),
        "self_attn.f_a_proj.weight": (d.kda_dim, d.hidden),
        "self_attn.f_b_proj.weight": (width, d.kda_dim),
        "self_attn.b_proj.weight": (d.kda_heads, d.hidden),
        "self_attn.o_norm.weight": (d.kda_dim,),
        "self_attn.o_proj.weight": (d.hidden, width),
    }


def _mla_shapes(d: Dims) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_a_proj.weight": (d.q_lora, d.hidden),
        "self_attn.q_a_layernorm.weight": (d.q_lora,),
        "self_attn.q_b_proj.weight": (d.mla_heads * (d.nope + d.rope), d.q_lora),
        "self_attn.kv_a_proj_with_mqa.weight": (d.latent + d.rope, d.hidden),
        "self_attn.kv_a_layernorm.weight": (d.latent,),
        "self_attn.kv_b_proj.weight": (d.mla_heads * (d.nope + d.v_dim), d.latent),
        "self_attn.g_proj.weight": (d.mla_heads * d.v_dim, d.hidden),
        "self_attn.o_proj.weight": (d.hidden, d.mla_heads * d.v_dim),
    }


def _dense_shapes(d: Dims) -> dict[str, tuple[int, ...]]:
    return _mlp_shapes("mlp", d.hidden, d.dense_width)


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def _moe_shapes(d: Dims) -> dict[str, tuple[int, ...]]:
    moe = "block_sparse_moe"
    return {
        f"{moe}.gate.weight": (d.n_experts, d.hidden),
        f"{moe}.gate.e_score_correction_bias": (d.n_experts,),
        f"{moe}.routed_expert_down_proj.weight": (d.expert_hidden, d.hidden),
        f"{moe}.routed_expert_up_proj.weight": (d.hidden, d.expert_hidden),
        f"{moe}.routed_expert_norm.weight": (d.expert_hidden,),
        f"{moe}.experts.w1": (d.n_experts, d.expert_width, d.expert_hidden),
        f"{moe}.experts.w3": (d.n_experts, d.expert_width, d.expert_hidden),
        f"{moe}.experts.w2": (d.n_experts, d.expert_hidden, d.expert_width),
        **_mlp_shapes(f"{moe}.shared_experts", d.hidden, d.n_shared * d.expert_width),
    }


def initial(d: Dims, seed: int) -> dict[str, Tensor]:
    """fp32 values on the CPU."""
    rng = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    for name, shape in shapes(d).items():
        out[name] = _value(name, shape, d, rng)
    for i in range(d.n_layers):
        if i not in d.mla_layers:
            _spread_decays(out, f"model.layers.{i}.self_attn.", d, rng)
    return out


def _value(name: str, shape: tuple[int, ...], d: Dims, rng: torch.Generator) -> Tensor:
    if name.endswith(("res_proj.weight", "e_score_correction_bias")):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    noise = torch.randn(shape, generator=rng)
    if name.endswith("embed_tokens.weight"):
        return noise * 0.5
    if name.endswith("conv1d.weight"):
        noise = noise * 0.15
        noise[:, 0, -1] += 0.8
        return noise
    half = name.endswith(_HALVED) or name.endswith("lm_head.weight")
    return noise * shape[-1] ** -0.5 * (0.5 if half else 1.0)


def _spread_decays(out: dict[str, Tensor], prefix: str, d: Dims, rng: torch.Generator) -> None:
    a = 0.5 + torch.rand(d.kda_heads, generator=rng)
    low, high = math.log(1e-3), math.log(0.7)
    decay = torch.exp(low + (high - low) * torch.rand(d.kda_heads, d.kda_dim, generator=rng))
    out[prefix + "A_log"] = a.log()
    out[prefix + "dt_bias"] = (torch.logit(decay / -d.lower_bound) / a[:, None]).flatten()
