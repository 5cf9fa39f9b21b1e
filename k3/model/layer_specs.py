"""What the layers of a Kimi-K3-family model are: one record per kind of layer, read from the text config.

`spec.py` puts them together. As there, what is required is never defaulted; nullable fields may be absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from k3.errors import ModelError
from k3.model.fields import Fields


class LayerKind(StrEnum):
    """Which attention a layer has."""

    MLA = "mla"
    KDA = "kda"


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Gated NoPE multi-head latent attention. The rope dims exist but are never rotated."""

    n_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    output_gate: bool

    @property
    def latent_width(self) -> int:
        """Values cached per token and layer: normalised latent, then the shared key dims."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Query and key dims of one head."""
        return self.nope_dim + self.rope_dim

    @property
    def scale(self) -> float:
        """Softmax scale; the same in expanded and absorbed form."""
        return self.query_dim**-0.5


@dataclass(frozen=True, slots=True)
class KdaSpec:
    """Kimi Delta Attention. Key and value dims are both `head_dim`."""

    n_heads: int
    head_dim: int
    conv_width: int
    full_rank_gate: bool
    gate_lower_bound: float | None

    @property
    def width(self) -> int:
        """Channels of q, k and v each."""
        return self.n_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts in a latent space beside always-on shared experts."""

    n_experts: int
    top_k: int
    n_shared: int
    width: int
    latent: int | None
    latent_norm: bool
    router: str  # "sigmoid" | "softmax"
    renormalize: bool
    scaling: float
    n_groups: int
    top_groups: int

    @property
    def shared_width(self) -> int:
        """Inner width of the shared experts as one MLP."""
        return self.n_shared * self.width

    def expert_in(self, hidden_size: int) -> int:
        """Width at which routed experts read and write."""
        return self.latent if self.latent is not None else hidden_size


@dataclass(frozen=True, slots=True)
class SituSpec:
    """Soft-clip constants of the activation; `linear_beta` None leaves the up branch untouched."""

    beta: float
    linear_beta: float | None


def read_layer_kinds(text: Fields, linear: Fields) -> tuple[LayerKind, ...]:
    """Attention of each layer, in order. Raises ModelError unless every layer is named once."""
    n_layers = text.size("num_hidden_layers")
    kda, full = linear.layer_list("kda_layers"), linear.layer_list("full_attn_layers")
    if sorted(kda + full) != list(range(1, n_layers + 1)):
        raise ModelError(
            f"{linear.path}: kda_layers {list(kda)} and full_attn_layers {list(full)} must be "
            f"disjoint and together name each of the layers 1..{n_layers} once"
        )
    mla = set(full)
    return tuple(LayerKind.MLA if i in mla else LayerKind.KDA for i in range(1, n_layers + 1))


def read_mla(text: Fields) -> MlaSpec:
    """Of the text config."""
    return MlaSpec(
        n_heads=text.size("num_attention_heads"),
        q_lora_rank=text.nullable_size("q_lora_rank"),
        kv_lora_rank=text.size("kv_lora_rank"),
        nope_dim=text.size("qk_nope_head_dim"),
        rope_dim=text.size("qk_rope_head_dim"),
        v_dim=text.size("v_head_dim"),
        output_gate=text.flag("mla_use_output_gate"),
    )


def read_kda(linear: Fields) -> KdaSpec:
    """Of its `linear_attn_config`."""
    lower_bound = linear.nullable_number("gate_lower_bound")
    if lower_bound is not None and lower_bound >= 0:
        raise linear.error("gate_lower_bound", lower_bound, "a negative number or null")
    return KdaSpec(
        n_heads=linear.size("num_heads"),
        head_dim=linear.size("head_dim"),
        conv_width=linear.size("short_conv_kernel_size"),
        full_rank_gate=linear.flag("use_full_rank_gate"),
        gate_lower_bound=lower_bound,
    )


def read_moe(text: Fields) -> MoeSpec:
    """Of the text config. Raises ModelError for numbers that contradict each other."""
    latent = text.nullable_size("routed_expert_hidden_size")
    grouped = text.flag("use_grouped_topk")
    moe = MoeSpec(
        n_experts=text.size("num_experts"),
        top_k=text.size("num_experts_per_token"),
        n_shared=text.count("num_shared_experts"),
        width=text.size("moe_intermediate_size"),
        latent=latent,
        latent_norm=latent is not None and text.flag("latent_moe_use_norm"),
        router=text.choice("moe_router_activation_func", "sigmoid", "softmax"),
        renormalize=text.flag("moe_renormalize"),
        scaling=text.number("routed_scaling_factor"),
        n_groups=text.size("num_expert_group") if grouped else 1,
        top_groups=text.size("topk_group") if grouped else 1,
    )
    if moe.top_k > moe.n_experts:
        raise text.error("num_experts_per_token", moe.top_k, f"at most {moe.n_experts} experts")
    if moe.n_experts % moe.n_groups or moe.top_groups > moe.n_groups:
        raise text.error(
            "num_expert_group",
            moe.n_groups,
            f"a divisor of num_experts={moe.n_experts}, at least topk_group={moe.top_groups}",
        )
    return moe


def read_situ(text: Fields) -> SituSpec:
    """Of the text config."""
    beta = text.nullable_number("activation_situ_beta")
    return SituSpec(
        beta=1.0 if beta is None else beta,
        linear_beta=text.nullable_number("activation_situ_linear_beta"),
    )
