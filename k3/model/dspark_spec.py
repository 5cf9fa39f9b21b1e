"""What a DSpark drafter is: `DraftSpec`, read from the drafter's own `config.json`, without torch.

Two published dialects are read: the MLA flavour (`k3_dspark`, fields at the top) and the GQA flavour (`qwen3` with a
`dflash_config`). Both become one spec. Slot 0 of a block is the anchor and predicts the first draft; checkpoints with
another convention are refused, because misreading it gives drafts that are never accepted and no other sign.
Which tap stream a drafter was trained on is recorded by few checkpoints; where it is not, the lineage decides
(MLA: prefix, GQA: mixture).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from k3.errors import ModelError
from k3.model.fields import Fields
from k3.model.rope import Rope, mscale, read_rope
from k3.model.spec import K3Spec

Shapes = dict[str, tuple[tuple[int, ...], ...]]

METHOD = "dspark"
# Targets whose stages relay the taps of a drafter of this method, and keep the embedding on the last stage for it.
PIPELINE_PAIRS = frozenset({("kimi_k3", METHOD), ("kimi_k31", METHOD)})
MARKOV_TYPES = ("vanilla", "gated", "rnn")
SHARED = ("embed_tokens.", "lm_head.", "rotary_emb.")  # the target's own, never loaded from here
CONFIDENCE = "confidence_head."


@dataclass(frozen=True, slots=True)
class MlaDraft:
    """Latent attention of a drafter; rotated, not gated."""

    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class GqaDraft:
    """Grouped-query attention of a drafter, heads normalised before the rotation."""

    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """One drafter. taps: 0-based target layers (-1: the embedding) in the order of the projection's columns.

    block_size: slots the drafter was trained with, None where a checkpoint does not say.
    """

    attention: MlaDraft | GqaDraft
    hidden_size: int
    intermediate_size: int
    num_layers: int
    n_heads: int
    eps: float
    rope: Rope
    vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    tap_stream: str
    mask_token_id: int
    block_size: int | None
    markov_rank: int
    markov_type: str
    has_confidence: bool

    @property
    def flavour(self) -> Literal["mla", "gqa"]:
        """Which attention."""
        return "mla" if isinstance(self.attention, MlaDraft) else "gqa"

    @property
    def scale(self) -> float:
        """Softmax scale."""
        match self.attention:
            case MlaDraft(nope_dim=nope, rope_dim=rope):
                yarn = self.rope.yarn
                m = 1.0
                if yarn is not None and yarn.mscale_all_dim:
                    m = mscale(yarn.factor, yarn.mscale_all_dim)
                return (nope + rope) ** -0.5 * m * m
            case GqaDraft(head_dim=head_dim):
                return head_dim**-0.5

    def block(self, draft_tokens: int) -> int:
        """Slots computed for `draft_tokens` drafts: the trained width. Raises ModelError when it is exceeded."""
        if self.block_size is None:
            return draft_tokens
        if draft_tokens > self.block_size:
            raise ModelError(
                f"spec.draft_tokens={draft_tokens}: the drafter was trained for blocks of {self.block_size}; "
                "lower spec.draft_tokens"
            )
        return self.block_size

    def split_axes(self) -> dict[str, int]:
        """What is split over the ranks of a stage: name -> size."""
        axes = {"attention heads": self.n_heads, "feed-forward columns": self.intermediate_size}
        match self.attention:
            case MlaDraft():
                return axes
            case GqaDraft(n_kv_heads=heads):
                return axes | {"key heads": heads}

    def place_shape(self, page_tokens: int, shards: int) -> tuple[int, ...]:
        """Rows of one page on one of `shards` ranks.

        MLA: [layers, tokens, latent + rotated], whole on every rank. GQA: [kv heads, layers, 2 (k, v), tokens, dim].
        """
        match self.attention:
            case MlaDraft(kv_lora_rank=rank, rope_dim=rope):
                return (self.num_layers, page_tokens, rank + rope)
            case GqaDraft(n_kv_heads=heads, head_dim=dim):
                return (heads // shards, self.num_layers, 2, page_tokens, dim)

    def fingerprint(self, *, digest: str, dtype: str, page_tokens: int) -> str:
        """Identity of the rows: unless both sides have the same, rows are not sent. digest: of the folder."""
        parts = (digest, self.tap_stream, dtype, str(page_tokens))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def check_target(self, target: K3Spec) -> None:
        """Raise ModelError unless the drafter belongs to this target."""
        problems = (
            (self.vocab_size != target.vocab_size, "vocab_size", target.vocab_size),
            (
                self.target_hidden_size != target.hidden_size,
                "target_hidden_size",
                target.hidden_size,
            ),
            (self.hidden_size != target.hidden_size, "hidden_size", target.hidden_size),
        )
        for is_wrong, name, expected in problems:
            if is_wrong:
                raise ModelError(
                    f"drafter {name} differs: expected {expected} as in the target, whose embedding and head it "
                    "shares; give spec.drafter the drafter of this model",
                    code="DRAFT_VOCAB" if name == "vocab_size" else "bad_model",
                )
        last = target.num_layers - 1
        outside = [tap for tap in self.taps if not -1 <= tap < last]
        if outside:
            raise ModelError(
                f"drafter target_layer_ids {outside}: expected -1 (embedding) or 0..{last - 1}; the last layer "
                "is no tap, its recorded hidden state is the normalised one",
                code="AUX_TAPS_RANGE",
            )

    def tensors(self, *, confidence: bool) -> Shapes:
        """Name -> accepted shapes of everything that is loaded."""
        h, n_taps = self.hidden_size, len(self.taps)
        is_mla = self.flavour == "mla"
        projection, norm = ("context_proj", "context_norm") if is_mla else ("fc", "hidden_norm")
        rank, vocab = self.markov_rank, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {
            f"{projection}.weight": (h, n_taps * self.target_hidden_size),
            f"{norm}.weight": (h,),
            ("final_norm.weight" if is_mla else "norm.weight"): (h,),
            "markov_head.markov_w1.weight": (vocab, rank),
            "markov_head.markov_w2.weight": (vocab, rank),
        }
        if self.markov_type == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, h + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        elif self.markov_type == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + h)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
        if confidence:
            shapes[f"{CONFIDENCE}proj.weight"] = (1, h + rank)
            shapes[f"{CONFIDENCE}proj.bias"] = (1,)
        for layer in range(self.num_layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self._layer().items()}
        return {name: (shape,) for name, shape in shapes.items()}

    def _layer(self) -> dict[str, tuple[int, ...]]:
        h, f, heads = self.hidden_size, self.intermediate_size, self.n_heads
        match self.attention:
            case MlaDraft() as a:
                attention = {
                    "q_a_proj": (a.q_lora_rank, h),
                    "q_a_layernorm": (a.q_lora_rank,),
                    "q_b_proj": (heads * (a.nope_dim + a.rope_dim), a.q_lora_rank),
                    "kv_a_proj_with_mqa": (a.kv_lora_rank + a.rope_dim, h),
                    "kv_a_layernorm": (a.kv_lora_rank,),
                    "kv_b_proj": (heads * (a.nope_dim + a.v_dim), a.kv_lora_rank),
                    "o_proj": (h, heads * a.v_dim),
                }
            case GqaDraft() as a:
                attention = {
                    "q_proj": (heads * a.head_dim, h),
                    "k_proj": (a.n_kv_heads * a.head_dim, h),
                    "v_proj": (a.n_kv_heads * a.head_dim, h),
                    "q_norm": (a.head_dim,),
                    "k_norm": (a.head_dim,),
                    "o_proj": (h, heads * a.head_dim),
                }
        shapes = {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
        return shapes | {
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
            "mlp.gate_proj.weight": (f, h),
            "mlp.up_proj.weight": (f, h),
            "mlp.down_proj.weight": (h, f),
        }

    @classmethod
    def from_folder(cls, folder: Path) -> DraftSpec:
        """Read `folder/config.json`. Raises ModelError naming the file or the field."""
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(
                f"cannot read {path}: {error.strerror}; point spec.drafter at a drafter's folder"
            ) from error
        except ValueError as error:
            raise ModelError(f"{path} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ModelError(f"{path}: expected a JSON object, got {type(config).__name__}")
        return cls.from_config(cast("dict[str, Any]", config), str(path))

    @classmethod
    def from_config(cls, config: dict[str, Any], where: str = "config.json") -> DraftSpec:
        """Read one of the published dialects. Raises ModelError naming the field."""
        top = Fields(config, where)
        if "speculators_model_type" in config:
            raise top.error(
                "speculators_model_type",
                config["speculators_model_type"],
                "a DSpark checkpoint whose slot 0 predicts the token after the anchor",
            )
        is_mla = top.choice("model_type", "k3_dspark", "qwen3") == "k3_dspark"
        fields = top if is_mla else top.section("dflash_config")
        _refuse_unsupported(top, fields, is_mla=is_mla)
        attention = _mla(top) if is_mla else _gqa(top)
        rotated = attention.rope_dim if isinstance(attention, MlaDraft) else attention.head_dim
        stream = "prefix" if is_mla else "mixture"
        for name in ("tap_stream", "aux_hidden_stream"):
            if fields.values.get(name) is not None:
                stream = fields.choice(name, "prefix", "mixture")
                break
        return cls(
            attention=attention,
            hidden_size=top.size("hidden_size"),
            intermediate_size=top.size("intermediate_size"),
            num_layers=top.size("num_hidden_layers"),
            n_heads=top.size("num_attention_heads"),
            eps=top.number("rms_norm_eps"),
            rope=read_rope(top, rotated, is_interleaved=is_mla),
            vocab_size=top.size("vocab_size"),
            target_hidden_size=fields.nullable_size("target_hidden_size")
            or top.size("hidden_size"),
            taps=_taps(fields),
            tap_stream=stream,
            mask_token_id=_mask(top, fields),
            block_size=top.nullable_size("block_size") or fields.nullable_size("block_size"),
            markov_rank=fields.size("markov_rank"),
            markov_type=_optional_choice(fields, "markov_head_type", *MARKOV_TYPES),
            has_confidence=bool(fields.values.get("enable_confidence_head", False)),
        )


def ring_places(window: int, group: int, page_tokens: int) -> int:
    """Page places of a slot's draft ring: the window that is read, and room for one verify group."""
    return -(-window // page_tokens) + -(-group // page_tokens)


def _optional_choice(fields: Fields, name: str, *allowed: str) -> str:
    """The field, or the first allowed value where a checkpoint does not have it."""
    return allowed[0] if fields.values.get(name) is None else fields.choice(name, *allowed)


def _refuse_unsupported(top: Fields, fields: Fields, *, is_mla: bool) -> None:
    _optional_choice(fields, "slot_convention", "anchor_predicts")
    for name in ("causal_block", "attention_bias", "mla_use_output_gate", "mla_use_nope"):
        for section in (top, fields):
            if section.values.get(name):
                raise section.error(
                    name, section.values[name], "false; nothing else is implemented"
                )
    for section in (top, fields):
        wanted = section.values.get("rope_interleave")
        if wanted is not None and wanted is not is_mla:
            raise section.error("rope_interleave", wanted, f"{is_mla} for this flavour")
    _optional_choice(top, "hidden_act", "silu")


def _mla(top: Fields) -> MlaDraft:
    return MlaDraft(
        q_lora_rank=top.size("q_lora_rank"),
        kv_lora_rank=top.size("kv_lora_rank"),
        nope_dim=top.size("qk_nope_head_dim"),
        rope_dim=top.size("qk_rope_head_dim"),
        v_dim=top.size("v_head_dim"),
    )


def _gqa(top: Fields) -> GqaDraft:
    heads, kv_heads = top.size("num_attention_heads"), top.size("num_key_value_heads")
    if heads % kv_heads:
        raise top.error("num_key_value_heads", kv_heads, f"a divisor of {heads} attention heads")
    return GqaDraft(kv_heads, top.size("head_dim"))


def _taps(fields: Fields) -> tuple[int, ...]:
    value = fields.required("target_layer_ids", "a list of layers")
    is_list = isinstance(value, list) and all(isinstance(i, int) for i in cast("list[Any]", value))
    if (
        not is_list
        or not value
        or len(set(cast("list[int]", value))) != len(cast("list[int]", value))
    ):
        raise fields.error("target_layer_ids", cast("object", value), "a list of distinct layers")
    return tuple(cast("list[int]", value))


def _mask(top: Fields, fields: Fields) -> int:
    mask, vocab = fields.count("mask_token_id"), top.size("vocab_size")
    if mask >= vocab:
        raise fields.error("mask_token_id", mask, f"an id below vocab_size={vocab}")
    return mask
