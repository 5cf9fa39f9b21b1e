"""DSpark drafters, both flavours, as the training and the rollouts run them.

A block of k slots `[anchor, MASK x (k-1)]` sits at positions base..base+k-1 and sees the context rows before its anchor
and its own slots, without causal mask. Context rows come from target taps, projected once. Names follow the published
checkpoints. Golden: dspark/train_loss, drafter_gqa, drafter_mla.

B documents, A anchors each, k slots, S context rows, H hidden, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Params = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class DraftDims:
    """Numbers of a drafter; fields of the other flavour stay unused."""

    flavour: Literal["mla", "gqa"]
    hidden: int = 256
    intermediate: int = 768
    n_layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    q_lora: int = 128
    kv_lora: int = 64
    nope: int = 32
    rope: int = 16
    v_dim: int = 32
    eps: float = 1e-5
    theta: float = 10_000.0
    vocab: int = 4_096
    target_hidden: int = 256
    taps: tuple[int, ...] = (1, 3, 7, 9, 11)
    markov_rank: int = 64
    block: int = 7
    mask_id: int = 4_080

    @property
    def rotated(self) -> int:
        """Width of the rotated part of a head."""
        return self.rope if self.flavour == "mla" else self.head_dim

    @property
    def scale(self) -> float:
        """Softmax scale without YaRN."""
        return (self.nope + self.rope if self.flavour == "mla" else self.head_dim) ** -0.5

    def frequencies(self) -> Tensor:
        """Inverse frequencies without YaRN [rotated / 2]."""
        return self.theta ** (-torch.arange(0, self.rotated, 2).float() / self.rotated)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter."""
        h, mla = self.hidden, self.flavour == "mla"
        wide = len(self.taps) * self.target_hidden
        out: dict[str, tuple[int, ...]] = {
            ("context_proj.weight" if mla else "fc.weight"): (h, wide),
            ("context_norm.weight" if mla else "hidden_norm.weight"): (h,),
            ("final_norm.weight" if mla else "norm.weight"): (h,),
            "markov_head.markov_w1.weight": (self.vocab, self.markov_rank),
            "markov_head.markov_w2.weight": (self.vocab, self.markov_rank),
            "confidence_head.proj.weight": (1, h + self.markov_rank),
            "confidence_head.proj.bias": (1,),
        }
        attention = self._mla_shapes() if mla else self._gqa_shapes()
        for i in range(self.n_layers):
            layer = {f"self_attn.{name}.weight": shape for name, shape in attention.items()} | {
                "mlp.gate_proj.weight": (self.intermediate, h),
                "mlp.up_proj.weight": (self.intermediate, h),
                "mlp.down_proj.weight": (h, self.intermediate),
                "input_layernorm.weight": (h,),
                "post_attention_layernorm.weight": (h,),
            }
            out |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        return out

    def _mla_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "q_a_proj": (self.q_lora, self.hidden),
            "q_a_layernorm": (self.q_lora,),
            "q_b_proj": (self.heads * (self.nope + self.rope), self.q_lora),
            "kv_a_proj_with_mqa": (self.kv_lora + self.rope, self.hidden),
            "kv_a_layernorm": (self.kv_lora,),
            "kv_b_proj": (self.heads * (self.nope + self.v_dim), self.kv_lora),
            "o_proj": (self.hidden, self.heads * self.v_dim),
        }

    def _gqa_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "q_proj": (self.heads * self.head_dim, self.hidden),
            "k_proj": (self.kv_heads * self.head_dim, self.hidden),
            "v_proj": (self.kv_heads * self.head_dim, self.hidden),
            "q_norm": (self.head_dim,),
            "k_norm": (self.head_dim,),
            "o_proj": (self.hidden, self.heads * self.head_dim),
        }


def initial(dims: DraftDims, seed: int) -> dict[str, Tensor]:
    """fp32 values: linears fan_in^-0.5, output projections half, second Markov matrix and confidence zero."""
    rng = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    for name, shape in dims.shapes().items():
        if name.startswith("confidence_head") or name.endswith("markov_w2.weight"):
            out[name] = torch.zeros(shape)
        elif len(shape) == 1:
            out[name] = torch.ones(shape)
        else:
            half = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            out[name] = torch.randn(shape, generator=rng) * shape[-1] ** -0.5 * half
    return out


def is_muon(name: str) -> bool:
    """Matrices of the layers and the context projection; tables, norms and confidence are AdamW's."""
    if name.startswith(("markov_head", "confidence_head")):
        return False
    return not name.endswith(("norm.weight", ".bias"))


@dataclass(frozen=True, slots=True)
class Blocks:
    """Draft blocks over packed context.

    taps [B, S, m*Ht]; context_position [B, S] absolute, negative where a row is padding; anchor_position [B, A]
    absolute; inputs [B, A*k, H] embedded slots. Rows older than `window` before the anchor are hidden.
    """

    taps: Tensor
    context_position: Tensor
    anchor_position: Tensor
    inputs: Tensor
    window: int | None = None


class Drafter:
    """The forward of one flavour; `frequencies` and `scale` replace the plain rotation, for YaRN checkpoints."""

    def __init__(
        self, dims: DraftDims, frequencies: Tensor | None = None, scale: float | None = None
    ) -> None:
        self.dims = dims
        self.frequencies = dims.frequencies() if frequencies is None else frequencies
        self.scale = scale or dims.scale

    def hidden(self, blocks: Blocks, p: Params) -> Tensor:
        """Final-normed block rows [B, A, k, H]."""
        d, mla = self.dims, self.dims.flavour == "mla"
        projection, norm = ("context_proj", "context_norm") if mla else ("fc", "hidden_norm")
        context = _rms(F.linear(blocks.taps, p[f"{projection}.weight"]), p[f"{norm}.weight"], d.eps)
        slots = torch.arange(d.block, device=context.device)
        position = (blocks.anchor_position[..., None] + slots).flatten(1)  # [B, A*k]
        allowed = self._allowed(blocks)
        angles = self._angles(torch.cat((blocks.context_position.clamp(min=0), position), 1))
        x = blocks.inputs
        attend = self._mla if mla else self._gqa
        for i in range(d.n_layers):
            layer = {
                k.removeprefix(f"layers.{i}."): v
                for k, v in p.items()
                if k.startswith(f"layers.{i}.")
            }
            normed = _rms(x, layer["input_layernorm.weight"], d.eps)
            x = x + attend(context, normed, angles, allowed, layer)
            y = _rms(x, layer["post_attention_layernorm.weight"], d.eps)
            y = F.silu(F.linear(y, layer["mlp.gate_proj.weight"])) * F.linear(
                y, layer["mlp.up_proj.weight"]
            )
            x = x + F.linear(y, layer["mlp.down_proj.weight"])
        last = p["final_norm.weight" if mla else "norm.weight"]
        return _rms(x, last, d.eps).view(*blocks.anchor_position.shape, d.block, d.hidden)

    def _allowed(self, blocks: Blocks) -> Tensor:
        """Mask [B, 1, A*k, S + A*k]: context before the anchor (in the window), and the own block."""
        d = self.dims
        anchor = blocks.anchor_position[..., None]  # [B, A, 1]
        row = blocks.context_position[:, None]  # [B, 1, S]
        seen = (row >= 0) & (row < anchor)
        if blocks.window is not None:
            seen = seen & (row >= anchor - blocks.window)
        n_anchors = anchor.shape[1]
        own = torch.eye(n_anchors, dtype=torch.bool, device=anchor.device).repeat_interleave(
            d.block, 1
        )
        both = torch.cat((seen, own.expand(len(seen), -1, -1)), -1)
        return both.repeat_interleave(d.block, 1)[:, None]

    def _angles(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [B, 1, S + A*k, rotated / 2] fp32."""
        turn = position[:, None, :, None].float() * self.frequencies.to(position.device)
        return turn.cos(), turn.sin()

    def _mla(
        self, context: Tensor, x: Tensor, angles: tuple[Tensor, Tensor], allowed: Tensor, p: Params
    ) -> Tensor:
        d = self.dims
        n_context = context.shape[1]
        q = F.linear(x, p["self_attn.q_a_proj.weight"])
        q = F.linear(
            _rms(q, p["self_attn.q_a_layernorm.weight"], d.eps), p["self_attn.q_b_proj.weight"]
        )
        q = _heads(q, d.heads)
        cos, sin = angles
        q_pe = _rotate_pairs(q[..., d.nope :], cos[:, :, n_context:], sin[:, :, n_context:])
        z = F.linear(torch.cat((context, x), 1), p["self_attn.kv_a_proj_with_mqa.weight"])
        latent = _rms(z[..., : d.kv_lora], p["self_attn.kv_a_layernorm.weight"], d.eps)
        k_pe = _rotate_pairs(z[:, None, :, d.kv_lora :], cos, sin).expand(-1, d.heads, -1, -1)
        kv = _heads(F.linear(latent, p["self_attn.kv_b_proj.weight"]), d.heads)
        k = torch.cat((kv[..., : d.nope], k_pe), -1)
        q = torch.cat((q[..., : d.nope], q_pe), -1)
        v = kv[..., d.nope :].contiguous()
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
        return F.linear(o.transpose(1, 2).flatten(2), p["self_attn.o_proj.weight"])

    def _gqa(
        self, context: Tensor, x: Tensor, angles: tuple[Tensor, Tensor], allowed: Tensor, p: Params
    ) -> Tensor:
        d = self.dims
        n_context = context.shape[1]
        rows = torch.cat((context, x), 1)
        q = _rms(
            _heads(F.linear(x, p["self_attn.q_proj.weight"]), d.heads),
            p["self_attn.q_norm.weight"],
            d.eps,
        )
        k = _heads(F.linear(rows, p["self_attn.k_proj.weight"]), d.kv_heads)
        k = _rms(k, p["self_attn.k_norm.weight"], d.eps)
        v = _heads(F.linear(rows, p["self_attn.v_proj.weight"]), d.kv_heads)
        cos, sin = angles
        q = _rotate_halves(q, cos[:, :, n_context:], sin[:, :, n_context:])
        k = _rotate_halves(k, cos, sin)
        groups = d.heads // d.kv_heads
        k, v = (y.repeat_interleave(groups, 1) for y in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
        return F.linear(o.transpose(1, 2).flatten(2), p["self_attn.o_proj.weight"])


def markov_bias(previous: Tensor, p: Params) -> Tensor:
    """Bias over the vocabulary given the previous token, any leading shape."""
    return F.linear(p["markov_head.markov_w1.weight"][previous], p["markov_head.markov_w2.weight"])


def confidence_logits(hidden: Tensor, previous: Tensor, p: Params) -> Tensor:
    """Logit that a slot's draft is accepted given that those before it were."""
    rows = torch.cat((hidden.float(), p["markov_head.markov_w1.weight"][previous].float()), -1)
    weight, bias = p["confidence_head.proj.weight"].float(), p["confidence_head.proj.bias"].float()
    return F.linear(rows, weight, bias)[..., 0]


@dataclass(frozen=True, slots=True)
class Loss:
    """total to minimize; its parts and the teacher-forced accepted length."""

    total: Tensor
    ce: Tensor
    l1: Tensor
    confidence: Tensor
    tau: Tensor


def block_loss(
    draft_logits: Tensor,
    confidence: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    mask: Tensor,
    gamma: float,
) -> Loss:
    """0.1 CE + 0.9 L1 + BCE of acceptance, slots weighted exp(-i / gamma).

    draft_logits, target_logits [..., k, V]; confidence, labels [..., k]; mask [..., k] already cumulative.
    Sums over all leading dimensions divided by the sum of weights.
    """
    k = labels.shape[-1]
    weight = torch.exp(-torch.arange(k, device=labels.device) / gamma) * mask
    log_q = torch.log_softmax(draft_logits.float(), -1)
    q, p = log_q.exp(), torch.softmax(target_logits.float(), -1)
    distance = (q - p).abs().sum(-1)
    accept = (1 - distance.detach() / 2).clamp(0, 1)
    ce = -log_q.gather(-1, labels[..., None])[..., 0]
    bce = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
    total = weight.sum() + 1e-6
    parts = [(weight * term).sum() / total for term in (ce, distance, bce)]
    alive = (accept * mask).cumprod(-1).sum(-1)
    n_blocks = mask[..., 0].sum().clamp(min=1)
    tau = 1 + (alive * mask[..., 0]).sum() / n_blocks
    return Loss(0.1 * parts[0] + 0.9 * parts[1] + parts[2], parts[0], parts[1], parts[2], tau)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight.to(x.dtype)


def _heads(x: Tensor, n: int) -> Tensor:
    """[B, R, n*D] -> [B, n, R, D]."""
    return x.view(*x.shape[:2], n, -1).transpose(1, 2)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs (2i, 2i+1)."""
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2).to(x.dtype)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (i, i + D/2)."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
    return turned.to(x.dtype)
