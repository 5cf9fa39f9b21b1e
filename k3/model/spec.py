"""What a Kimi-K3-family model is: `K3Spec`, read from a Hugging Face `config.json`.

Lives here: every number the model code and the cache layout need; those of one kind of layer in
`layer_specs.py`.
Not here: tensor names (`names.py`), weights, anything that imports torch.
A config that lacks a required field is refused by name; nothing is defaulted, because a silently
defaulted width gives a model that runs and is wrong. Nullable fields may be absent: absent is null.
Dispatch is on the *wrapper's* `architectures`; the inner text config carries the identity of the
older Kimi-Linear and says nothing. A bare text config (no wrapper) is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from k3.errors import ModelError
from k3.model.fields import Fields
from k3.model.layer_specs import (
    KdaSpec,
    LayerKind,
    MlaSpec,
    MoeSpec,
    SituSpec,
    read_kda,
    read_layer_kinds,
    read_mla,
    read_moe,
    read_situ,
)

FAMILY = "kimi_k3"
K3_ARCHITECTURE = "KimiK3ForConditionalGeneration"
ARCHITECTURES = {
    K3_ARCHITECTURE: K3_ARCHITECTURE,
    # K3.1 is served by the K3 class, every number from its own config.
    "KimiK31ForConditionalGeneration": K3_ARCHITECTURE,
}
TEXT_MODEL_TYPE = "kimi_linear"
DTYPES = ("float64", "float32", "bfloat16", "float16")
QK_NORM_EPS = 1e-6  # KDA query/key L2 norm: fixed, not rms_norm_eps
LORA_NORM_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm: fixed, not rms_norm_eps


@dataclass(frozen=True, slots=True)
class K3Spec:
    """One model. Layer indices are 0-based here, also where the config file counts from 1."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[LayerKind, ...]
    mla: MlaSpec
    kda: KdaSpec
    moe: MoeSpec
    situ: SituSpec
    dense_width: int
    first_dense: int
    moe_every: int
    attn_res_block: int | None
    rms_norm_eps: float
    tied_embeddings: bool
    max_position_embeddings: int
    dtype: str
    mxfp4_experts: bool
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    media_token_id: int | None

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layer_kinds)

    @property
    def kv_lora_rank(self) -> int:
        """Width of the cached latent, without the shared key dims."""
        return self.mla.kv_lora_rank

    @property
    def qk_rope_head_dim(self) -> int:
        """Shared key dims cached beside the latent (never rotated)."""
        return self.mla.rope_dim

    @property
    def kda_heads(self) -> int:
        """KDA heads of the whole model."""
        return self.kda.n_heads

    @property
    def kda_head_dim(self) -> int:
        """KDA key and value dims of a head."""
        return self.kda.head_dim

    @property
    def conv_width(self) -> int:
        """Taps of the short convolution, the current token included."""
        return self.kda.conv_width

    def is_mla(self, layer: int) -> bool:
        """Whether `layer` is a full-attention layer (the others are KDA)."""
        return self.layer_kinds[layer] is LayerKind.MLA

    def layers_of(self, kind: LayerKind, layers: range | None = None) -> tuple[int, ...]:
        """Global indices of the layers of `kind`, within `layers` (default: all)."""
        return tuple(i for i in layers or range(self.num_layers) if self.layer_kinds[i] is kind)

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` has routed experts (the others are dense)."""
        return layer >= self.first_dense and layer % self.moe_every == 0

    def bank_depth(self, layer: int) -> int:
        """AttnRes blocks that exist when `layer` starts; `num_layers` means after the last layer."""
        return 0 if self.attn_res_block is None else -(-layer // self.attn_res_block)

    @classmethod
    def from_folder(cls, folder: Path) -> K3Spec:
        """Read `folder/config.json`. Raises ModelError naming the file or the field."""
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(
                f"cannot read {path}: {error.strerror}; expected a model folder with a config.json "
                "and safetensors files; point model.path at one"
            ) from error
        except ValueError as error:
            raise ModelError(f"{path} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ModelError(f"{path}: expected a JSON object, got {type(config).__name__}")
        return cls.from_config(cast("dict[str, Any]", config), str(path))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> K3Spec:
        """Read a wrapper config or a bare text config. Raises ModelError naming the field."""
        wrapper = Fields(config, where)
        if "text_config" in config:
            text = wrapper.section("text_config")
            architecture = _architecture(wrapper)
        else:
            text, architecture = wrapper, _bare_architecture(wrapper)
        linear = text.section("linear_attn_config")
        _refuse_unsupported(text)
        return cls(
            architecture=architecture,
            vocab_size=text.size("vocab_size"),
            hidden_size=text.size("hidden_size"),
            layer_kinds=read_layer_kinds(text, linear),
            mla=read_mla(text),
            kda=read_kda(linear),
            moe=read_moe(text),
            situ=read_situ(text),
            dense_width=text.size("intermediate_size"),
            first_dense=text.count("first_k_dense_replace"),
            moe_every=text.size("moe_layer_freq"),
            attn_res_block=text.nullable_size("attn_res_block_size"),
            rms_norm_eps=text.number("rms_norm_eps"),
            tied_embeddings=text.flag("tie_word_embeddings"),
            max_position_embeddings=text.size("max_position_embeddings"),
            dtype=_dtype(text, wrapper),
            mxfp4_experts=_mxfp4(text, wrapper),
            bos_token_id=_token_id("bos_token_id", wrapper, text),
            eos_token_id=_token_id("eos_token_id", wrapper, text),
            pad_token_id=_token_id("pad_token_id", wrapper, text),
            media_token_id=_token_id("media_placeholder_token_id", wrapper, text),
        )


def _architecture(wrapper: Fields) -> str:
    value = wrapper.required("architectures", f"[{K3_ARCHITECTURE!r}]")
    listed = cast("list[Any]", value) if isinstance(value, list) else []
    if not listed or listed[0] not in ARCHITECTURES:
        raise wrapper.error(
            "architectures", cast("object", value), f"a list with one of {sorted(ARCHITECTURES)}"
        )
    return ARCHITECTURES[listed[0]]


def _bare_architecture(text: Fields) -> str:
    """A text config alone. Its own `architectures` is the older Kimi-Linear's and is not read."""
    text.choice("model_type", TEXT_MODEL_TYPE)
    return K3_ARCHITECTURE


def _refuse_unsupported(text: Fields) -> None:
    if not text.flag("mla_use_nope"):
        raise text.error(
            "mla_use_nope", False, "true; rotary positions in MLA layers are not implemented"
        )
    text.choice("hidden_act", "situ")
    text.choice("topk_method", "noaux_tc")
    heads, kv_heads = text.size("num_attention_heads"), text.size("num_key_value_heads")
    if heads != kv_heads:
        raise text.error("num_key_value_heads", kv_heads, f"num_attention_heads={heads}")


def _dtype(text: Fields, wrapper: Fields) -> str:
    for fields in (text, wrapper):
        for name in ("dtype", "torch_dtype"):
            if name in fields.values:
                return fields.choice(name, *DTYPES)
    return str(text.required("dtype", " or ".join(DTYPES)))


def _mxfp4(text: Fields, wrapper: Fields) -> bool:
    """Whether routed experts are stored as MXFP4. Any other quantisation is refused."""
    for fields in (text, wrapper):
        if fields.values.get("quantization_config") is not None:
            section = fields.section("quantization_config")
            section.choice("quant_method", "compressed-tensors")
            section.choice("format", "mxfp4-pack-quantized")
            groups = section.section("config_groups")
            for name in groups.values:
                size = groups.section(name).section("weights").size("group_size")
                if size != 32:
                    raise section.error("group_size", size, "32")
            return True
    return False


def _token_id(name: str, *sections: Fields) -> int | None:
    for fields in sections:
        value = fields.values.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise fields.error(name, value, "one token id")
            return value
    return None
