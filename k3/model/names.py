"""Names and shapes of every tensor of a checkpoint, in the Hugging Face spelling, without torch.

One table is what the loader compares a checkpoint with, what random test weights are made from, and
what parameter counts come from. Names carry no `language_model.` prefix here.
Where released checkpoints vary harmlessly (A_log padded or not, conv weights with or without the
middle axis) several shapes are listed; the first is the canonical one.
"""

from __future__ import annotations

from math import prod

from k3.model.spec import K3Spec

Shape = tuple[int, ...]
Shapes = dict[str, tuple[Shape, ...]]

LANGUAGE_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
MXFP4_GROUP = 32
A_LOG_MULTIPLE = 128


def layer_prefix(layer: int) -> str:
    """Common start of the names of one layer."""
    return f"model.layers.{layer}."


def layer_of(name: str) -> int | None:
    """Layer a tensor belongs to, None for tensors outside the layers."""
    if not name.startswith("model.layers."):
        return None
    number = name.split(".", 3)[2]
    return int(number) if number.isdigit() else None


def expert_of(name: str) -> int | None:
    """Routed expert a tensor belongs to, None for all others."""
    _, found, rest = name.partition(".block_sparse_moe.experts.")
    return int(rest.split(".", 1)[0]) if found else None


def expert_name(layer: int, expert: int, matrix: str) -> str:
    """Name of a routed expert's matrix (w1 gate, w3 up, w2 down) without its suffix."""
    return f"{layer_prefix(layer)}block_sparse_moe.experts.{expert}.{matrix}"


def _one(shape: Shape) -> tuple[Shape, ...]:
    return (shape,)


def model_tensors(spec: K3Spec) -> Shapes:
    """Name -> accepted shapes, for the whole text model."""
    shapes = outer_tensors(spec)
    for layer in range(spec.num_layers):
        shapes |= layer_tensors(spec, layer)
    return shapes


def outer_tensors(spec: K3Spec) -> Shapes:
    """Embedding, final mix and norm, head."""
    d = spec.hidden_size
    shapes = {
        "model.embed_tokens.weight": _one((spec.vocab_size, d)),
        "model.norm.weight": _one((d,)),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = _one((spec.vocab_size, d))
    if spec.attn_res_block is not None:
        shapes["model.output_attn_res_norm.weight"] = _one((d,))
        shapes["model.output_attn_res_proj.weight"] = _one((1, d))
    return shapes


def layer_tensors(spec: K3Spec, layer: int) -> Shapes:
    """Everything of one layer."""
    d, prefix = spec.hidden_size, layer_prefix(layer)
    shapes: Shapes = {
        "input_layernorm.weight": _one((d,)),
        "post_attention_layernorm.weight": _one((d,)),
    }
    if spec.attn_res_block is not None:
        for site in ("self_attention_res", "mlp_res"):
            shapes[f"{site}_norm.weight"] = _one((d,))
            shapes[f"{site}_proj.weight"] = _one((1, d))
    shapes |= _mla(spec) if spec.is_mla(layer) else _kda(spec)
    shapes |= _moe(spec) if spec.is_moe(layer) else _mlp("mlp.", d, spec.dense_width)
    return {prefix + name: accepted for name, accepted in shapes.items()}


def _mlp(prefix: str, d: int, width: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": _one((width, d)),
        f"{prefix}up_proj.weight": _one((width, d)),
        f"{prefix}down_proj.weight": _one((d, width)),
    }


def _mla(spec: K3Spec) -> Shapes:
    d, mla = spec.hidden_size, spec.mla
    query, value = mla.n_heads * mla.query_dim, mla.n_heads * mla.v_dim
    shapes: Shapes = {
        "kv_a_proj_with_mqa.weight": _one((mla.latent_width, d)),
        "kv_a_layernorm.weight": _one((mla.kv_lora_rank,)),
        "kv_b_proj.weight": _one((mla.n_heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank)),
        "o_proj.weight": _one((d, value)),
    }
    if mla.q_lora_rank is None:
        shapes["q_proj.weight"] = _one((query, d))
    else:
        shapes["q_a_proj.weight"] = _one((mla.q_lora_rank, d))
        shapes["q_a_layernorm.weight"] = _one((mla.q_lora_rank,))
        shapes["q_b_proj.weight"] = _one((query, mla.q_lora_rank))
    if mla.output_gate:
        shapes["g_proj.weight"] = _one((value, d))
    return {f"self_attn.{name}": accepted for name, accepted in shapes.items()}


def _kda(spec: K3Spec) -> Shapes:
    d, kda = spec.hidden_size, spec.kda
    width, head = kda.width, kda.head_dim
    padded = -(-kda.n_heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE
    shapes: Shapes = {
        "A_log": tuple(dict.fromkeys([(padded,), (kda.n_heads,), (1, 1, kda.n_heads, 1)])),
        "dt_bias": _one((width,)),
        "f_a_proj.weight": _one((head, d)),
        "f_b_proj.weight": _one((width, head)),
        "b_proj.weight": _one((kda.n_heads, d)),
        "o_norm.weight": _one((head,)),
        "o_proj.weight": _one((d, width)),
    }
    for part in ("q", "k", "v"):
        shapes[f"{part}_proj.weight"] = _one((width, d))
        conv = ((width, 1, kda.conv_width), (width, kda.conv_width))
        shapes[f"{part}_conv1d.weight"] = conv
    if kda.full_rank_gate:
        shapes["g_proj.weight"] = _one((width, d))
    else:
        shapes["g_a_proj.weight"] = _one((head, d))
        shapes["g_b_proj.weight"] = _one((width, head))
    return {f"self_attn.{name}": accepted for name, accepted in shapes.items()}


def _moe(spec: K3Spec) -> Shapes:
    d, moe = spec.hidden_size, spec.moe
    z = moe.expert_in(d)
    shapes: Shapes = {
        "gate.weight": _one((moe.n_experts, d)),
        "gate.e_score_correction_bias": _one((moe.n_experts,)),
    }
    if moe.n_shared:
        shapes |= _mlp("shared_experts.", d, moe.shared_width)
    if moe.latent is not None:
        shapes["routed_expert_down_proj.weight"] = _one((z, d))
        shapes["routed_expert_up_proj.weight"] = _one((d, z))
        if moe.latent_norm:
            shapes["routed_expert_norm.weight"] = _one((z,))
    for expert in range(moe.n_experts):
        for matrix, rows, cols in (
            ("w1", moe.width, z),
            ("w3", moe.width, z),
            ("w2", z, moe.width),
        ):
            name = f"experts.{expert}.{matrix}"
            if spec.mxfp4_experts:
                shapes[f"{name}.weight_packed"] = _one((rows, cols // 2))
                shapes[f"{name}.weight_scale"] = _one((rows, cols // MXFP4_GROUP))
            else:
                shapes[f"{name}.weight"] = _one((rows, cols))
    return {f"block_sparse_moe.{name}": accepted for name, accepted in shapes.items()}


def parameter_count(spec: K3Spec) -> int:
    """Parameters of the text model; an MXFP4 value counts as one, scales and padding do not count."""
    total = 0
    for name, accepted in model_tensors(spec).items():
        if name.endswith(".weight_scale"):
            continue
        if name.endswith(".A_log"):
            total += spec.kda.n_heads
        else:
            total += prod(accepted[0]) * (2 if name.endswith(".weight_packed") else 1)
    return total
