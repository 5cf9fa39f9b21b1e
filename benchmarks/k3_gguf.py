"""A Kimi-K3 checkpoint as a GGUF file of llama.cpp's architecture `kimi-k3`, for measuring beside it.

Lives here: which tensor is called what there, metadata, the file format (version 3). Two forms: `float32`, everything
unpacked, so that both sides compute with the same numbers; `stored`, bfloat16 and MXFP4 as in the checkpoint, which
llama.cpp multiplies with rounded activations. No tokenizer goes along: tokens are given as ids.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from k3_kernels.reference.mxfp4 import GROUP, unpack
from torch import Tensor

from k3.errors import ModelError
from k3.model.names import expert_name, layer_prefix
from k3.model.spec import K3Spec
from k3.model.weights import TensorSource, open_folder

ALIGNMENT = 32
SIGMOID = 2  # of llama.cpp's expert gating functions
Value = int | float | bool | str | Sequence[int]

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SITES = {"attn_res_score": "self_attention_res", "ffn_res_score": "mlp_res"}
KDA = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "ssm_conv1d_q": "q_conv1d",
    "ssm_conv1d_k": "k_conv1d",
    "ssm_conv1d_v": "v_conv1d",
    "ssm_f_a": "f_a_proj",
    "ssm_f_b": "f_b_proj",
    "ssm_beta": "b_proj",
    "ssm_g": "g_proj",
    "ssm_norm": "o_norm",
    "attn_output": "o_proj",
}
MLA = {
    "attn_q_a": "q_a_proj",
    "attn_q_a_norm": "q_a_layernorm",
    "attn_q_b": "q_b_proj",
    "attn_kv_a_mqa": "kv_a_proj_with_mqa",
    "attn_kv_a_norm": "kv_a_layernorm",
    "attn_gate": "g_proj",
    "attn_output": "o_proj",
}
DENSE = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
MOE = {
    "ffn_gate_inp": "gate",
    "ffn_routed_down": "routed_expert_down_proj",
    "ffn_routed_up": "routed_expert_up_proj",
    "ffn_routed_norm": "routed_expert_norm",
    "ffn_gate_shexp": "shared_experts.gate_proj",
    "ffn_up_shexp": "shared_experts.up_proj",
    "ffn_down_shexp": "shared_experts.down_proj",
}
EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}


class Kind(IntEnum):
    """Element types of GGUF tensors."""

    F32 = 0
    BF16 = 30
    MXFP4 = 39


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the file. shape: elements, outermost first; the file lists them innermost first."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    data: bytes


def metadata(spec: K3Spec) -> dict[str, Value]:
    """What llama.cpp wants to know of the model. Raises ModelError for one its graph cannot hold."""
    mla, kda, moe = spec.mla, spec.kda, spec.moe
    unfit = {
        "KDA heads unlike MLA heads": kda.n_heads != mla.n_heads,
        "a low-rank KDA gate": not kda.full_rank_gate,
        "a router that is not sigmoid": moe.router != "sigmoid",
        "dense layers after the first experts": spec.moe_every != 1,
        "tied embeddings": spec.tied_embeddings,
        "groups of experts": moe.n_groups > 1 and moe.n_groups > moe.top_groups,
    }
    if any(unfit.values()):
        names = ", ".join(name for name, is_so in unfit.items() if is_so)
        raise ModelError(f"llama.cpp's kimi-k3 cannot hold {names}")
    values: dict[str, Value] = {
        "vocab_size": spec.vocab_size,
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.dense_width,
        "leading_dense_block_count": spec.first_dense,
        "attention.head_count": mla.n_heads,
        "attention.head_count_kv": [int(spec.is_mla(i)) for i in range(spec.num_layers)],
        "attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "attention.key_length": mla.latent_width,
        "attention.value_length": mla.kv_lora_rank,
        "attention.key_length_mla": mla.query_dim,
        "attention.value_length_mla": mla.v_dim,
        "attention.kv_lora_rank": mla.kv_lora_rank,
        "rope.dimension_count": mla.rope_dim,
        "ssm.conv_kernel": kda.conv_width,
        "kda.head_dim": kda.head_dim,
        "expert_count": moe.n_experts,
        "expert_used_count": moe.top_k,
        "expert_shared_count": moe.n_shared,
        "expert_feed_forward_length": moe.width,
        "expert_weights_scale": float(moe.scaling),
        "expert_weights_norm": moe.renormalize,
        "expert_gating_func": SIGMOID,
        "activation.situ_beta": float(spec.situ.beta),
        "activation.situ_linear_beta": float(spec.situ.linear_beta or 0.0),  # 0: no clip
        "attn_res.block_size": spec.attn_res_block or 0,
    }
    optional: dict[str, Value | None] = {
        "attention.q_lora_rank": mla.q_lora_rank,
        "kda.gate_lower_bound": kda.gate_lower_bound,
        "expert_latent_length": moe.latent,
    }
    values |= {key: value for key, value in optional.items() if value is not None}
    head: dict[str, Value] = {
        "general.architecture": "kimi-k3",
        "general.name": "k3-mini",
        "general.alignment": ALIGNMENT,
        "tokenizer.ggml.model": "no_vocab",
    }
    return head | {f"kimi-k3.{key}": value for key, value in values.items()}


class Converter:
    """Reads a checkpoint's tensors and yields them as llama.cpp names and lays them out."""

    def __init__(self, spec: K3Spec, source: TensorSource, *, is_stored: bool) -> None:
        """is_stored: keep bfloat16 and MXFP4; otherwise everything becomes float32."""
        self.spec, self.source, self.is_stored = spec, source, is_stored
        self.present = source.shapes().keys()

    def entries(self) -> Iterator[Entry]:
        """Every tensor of the model."""
        yield from self._named("", OUTER, "")
        if self.spec.attn_res_block is not None:
            yield self._site("output_res_score", "model.output_attn_res")
        for layer in range(self.spec.num_layers):
            yield from self._layer(layer)

    def _layer(self, layer: int) -> Iterator[Entry]:
        to, at = f"blk.{layer}.", layer_prefix(layer)
        yield from self._named(to, NORMS, at)
        if self.spec.attn_res_block is not None:
            for name, site in SITES.items():
                yield self._site(to + name, at + site)
        yield from (self._mla if self.spec.is_mla(layer) else self._kda)(to, at + "self_attn.")
        if self.spec.is_moe(layer):
            yield from self._moe(to, at + "block_sparse_moe.", layer)
        else:
            yield from self._named(to, DENSE, at + "mlp.")

    def _named(self, to: str, names: Mapping[str, str], at: str) -> Iterator[Entry]:
        """Tensors that only change their name; those that this model lacks are left out."""
        for name, stored in names.items():
            if f"{at}{stored}.weight" in self.present:
                yield self._entry(f"{to}{name}.weight", self._read(f"{at}{stored}.weight"))

    def _site(self, name: str, stored: str) -> Entry:
        """Norm and projection of a mixing site occur only as their product."""
        norm, proj = (self._read(f"{stored}_{part}.weight").float() for part in ("norm", "proj"))
        return self._entry(f"{name}.weight", norm * proj.flatten())

    def _kda(self, to: str, at: str) -> Iterator[Entry]:
        yield from self._named(to, KDA, at)
        a_log_H = self._read(f"{at}A_log").flatten()[: self.spec.kda.n_heads]  # padded in K3
        yield self._entry(f"{to}ssm_a", -a_log_H.float().exp())
        yield self._entry(f"{to}ssm_dt.bias", self._read(f"{at}dt_bias").float())

    def _mla(self, to: str, at: str) -> Iterator[Entry]:
        mla = self.spec.mla
        yield from self._named(to, MLA | {"attn_q": "q_proj"}, at)
        both_HOC = self._read(f"{at}kv_b_proj.weight").unflatten(0, (mla.n_heads, -1))
        key_HNC, value_HVC = both_HOC.split([mla.nope_dim, mla.v_dim], dim=1)
        yield self._entry(f"{to}attn_k_b.weight", key_HNC.transpose(1, 2))
        yield self._entry(f"{to}attn_v_b.weight", value_HVC)

    def _moe(self, to: str, at: str, layer: int) -> Iterator[Entry]:
        yield from self._named(to, MOE, at)
        yield self._entry(f"{to}exp_probs_b.bias", self._read(f"{at}gate.e_score_correction_bias"))
        for name, matrix in EXPERTS.items():
            stored = [
                expert_name(layer, expert, matrix) for expert in range(self.spec.moe.n_experts)
            ]
            yield self._experts(f"{to}{name}.weight", stored)

    def _experts(self, name: str, stored: Sequence[str]) -> Entry:
        if not self.spec.mxfp4_experts:
            return self._entry(name, torch.stack([self._read(f"{n}.weight") for n in stored]))
        packed_EOB = torch.stack([self._read(f"{n}.weight_packed") for n in stored])
        scale_EOG = torch.stack([self._read(f"{n}.weight_scale") for n in stored])
        if not self.is_stored:
            return self._entry(name, unpack(packed_EOB, scale_EOG, torch.float32))
        shape = (*packed_EOB.shape[:-1], packed_EOB.shape[-1] * 2)
        blocks = mxfp4_blocks(packed_EOB, scale_EOG)
        return Entry(name, Kind.MXFP4, shape, blocks.numpy().tobytes())

    def _read(self, name: str) -> Tensor:
        return self.source.read(name, ())

    def _entry(self, name: str, tensor: Tensor) -> Entry:
        if self.is_stored and tensor.dtype == torch.bfloat16:
            data = tensor.contiguous().view(torch.int16)
            return Entry(name, Kind.BF16, tuple(tensor.shape), data.numpy().tobytes())
        data = tensor.float().contiguous()
        return Entry(name, Kind.F32, tuple(tensor.shape), data.numpy().tobytes())


def mxfp4_blocks(packed: Tensor, scale: Tensor) -> Tensor:
    """Blocks of 32 inputs as ggml has them: the scale, then byte i with inputs i (low) and i + 16 (high).

    packed: uint8 [..., I / 2], byte b with inputs 2b (low) and 2b + 1; scale: uint8 [..., I / 32].
    Returns uint8 [..., I / 32, 17].
    """
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2).unflatten(-1, (-1, GROUP))
    low, high = codes.chunk(2, -1)
    return torch.cat((scale.unsqueeze(-1), low | (high << 4)), -1)


# ------------------------------------------------------------------ the file


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    """A typed value; numbers are uint32 or float32."""
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case _:
            return struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)


def _padding(n_bytes: int) -> bytes:
    return b"\0" * (-n_bytes % ALIGNMENT)


def write(path: Path, values: Mapping[str, Value], entries: Sequence[Entry]) -> None:
    """Header, metadata, list of tensors, then their data, each at a multiple of `ALIGNMENT`."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(values))]
    head += [_string(key) + _value(value) for key, value in values.items()]
    offset = 0
    for entry in entries:
        n = len(entry.shape)
        sizes = struct.pack(f"<I{n}Q", n, *reversed(entry.shape))
        head.append(_string(entry.name) + sizes + struct.pack("<IQ", entry.kind, offset))
        offset += len(entry.data) + len(_padding(len(entry.data)))
    start = b"".join(head)
    with path.open("wb") as file:
        file.write(start + _padding(len(start)))
        for entry in entries:
            file.write(entry.data + _padding(len(entry.data)))


def convert(folder: Path, path: Path, *, is_stored: bool) -> None:
    """Write the checkpoint in `folder` to `path`. Raises ModelError for a model llama.cpp cannot hold."""
    spec = K3Spec.from_folder(folder)
    write(
        path,
        metadata(spec),
        list(Converter(spec, open_folder(folder), is_stored=is_stored).entries()),
    )
