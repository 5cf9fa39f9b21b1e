"""Attention of a drafter, both flavours: what a token's row is, and how a block attends to rows.

Rows come from projected context (no layer norm before them) or, for the block itself, from the layer's input. Positions
are absolute; what is stored is normalised and rotated already. Attention outputs are partial sums over the shard group.

Letters: B requests, K slots, M = context rows and own slots, D hidden, H heads of this rank, W row width, C latents,
N + E: plain and rotated query dims, G query heads of a key head, Q = G * K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from k3_kernels.api import DenseOps
from k3_kernels.drafts import DraftRotation
from torch import Tensor

from k3.model.dspark_spec import DraftSpec, GqaDraft, MlaDraft, Rope
from k3.model.layers import wide
from k3.model.weights import Weights
from k3.parallel.mesh import Shard


class Rotation:
    """What positions mean to queries and keys; `at` turns them into cosine and sine once for all layers."""

    def __init__(self, rope: Rope, dtype: torch.dtype, device: torch.device) -> None:
        self.is_interleaved = rope.is_interleaved
        self.amplitude = rope.amplitude
        self.frequencies = torch.tensor(rope.frequencies(), dtype=wide(dtype), device=device)

    def whole(self) -> DraftRotation:
        """For a backend that rotates where it computes."""
        dim = 2 * len(self.frequencies)
        return DraftRotation(self.frequencies, self.amplitude, dim, self.is_interleaved)

    def at(self, positions: Tensor) -> Turn:
        """positions: absolute, int64, any shape."""
        turn = positions.to(self.frequencies.dtype).unsqueeze(-1) * self.frequencies
        cos, sin = turn.cos() * self.amplitude, turn.sin() * self.amplitude
        return Turn(cos, sin, self.is_interleaved)


@dataclass(frozen=True, slots=True)
class Turn:
    """The rotation of the last axis at some positions. cos, sin: [*positions, dim / 2]."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x: [*positions, ..., dim]; axes between are heads."""
        heads = [1] * (x.dim() - self.cos.dim())
        shape = (*self.cos.shape[:-1], *heads, self.cos.shape[-1])
        cos, sin = self.cos.view(shape), self.sin.view(shape)
        y = x.to(cos.dtype)
        if self.is_interleaved:
            a, b = y[..., 0::2], y[..., 1::2]
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        else:
            a, b = y.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
        return turned.to(x.dtype)


class LatentRows:
    """MLA: one row per token, normalised latent beside the rotated shared key."""

    def __init__(
        self, spec: DraftSpec, attention: MlaDraft, ops: DenseOps, weights: Weights, prefix: str
    ) -> None:
        self.rank, self.eps, self.ops = attention.kv_lora_rank, spec.eps, ops
        self.down = ops.projection(weights.take(f"{prefix}kv_a_proj_with_mqa.weight"))
        self.norm = weights.take(f"{prefix}kv_a_layernorm.weight")

    def __call__(self, x: Tensor, turn: Turn) -> Tensor:
        """x: [*positions, D] -> [*positions, W]."""
        z = self.down(x)
        latent = self.ops.rms_norm(z[..., : self.rank], self.norm, self.eps)
        return torch.cat((latent, turn(z[..., self.rank :])), -1)


class HeadRows:
    """GQA: a normalised, rotated key and a value per head of this rank."""

    def __init__(
        self,
        spec: DraftSpec,
        attention: GqaDraft,
        shard: Shard,
        ops: DenseOps,
        weights: Weights,
        prefix: str,
    ) -> None:
        self.head_dim, self.eps, self.ops = attention.head_dim, spec.eps, ops
        self.k = ops.projection(weights.take(f"{prefix}k_proj.weight", shard=shard))
        self.v = ops.projection(weights.take(f"{prefix}v_proj.weight", shard=shard))
        self.norm = weights.take(f"{prefix}k_norm.weight")

    def __call__(self, x: Tensor, turn: Turn) -> Tensor:
        """x: [*positions, D] -> [*positions, H, 2, dim]."""
        k = self.k(x).unflatten(-1, (-1, self.head_dim))
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        return torch.stack((turn(self.ops.rms_norm(k, self.norm, self.eps)), v), -2)


class LatentAttention:
    """Attention of one MLA layer in absorbed form; returns a partial sum over the shard group."""

    def __init__(
        self,
        spec: DraftSpec,
        attention: MlaDraft,
        shard: Shard,
        ops: DenseOps,
        weights: Weights,
        prefix: str,
    ) -> None:
        self.eps, self.scale, self.spec, self.ops = spec.eps, spec.scale, attention, ops
        self.n_heads = shard.size(spec.n_heads)
        self.q_a = ops.projection(weights.take(f"{prefix}q_a_proj.weight"))
        self.q_norm = weights.take(f"{prefix}q_a_layernorm.weight")
        self.q_b = ops.projection(weights.take(f"{prefix}q_b_proj.weight", shard=shard))
        up = weights.take(f"{prefix}kv_b_proj.weight", shard=shard)
        self.up_HEC = up.view(self.n_heads, attention.nope_dim + attention.v_dim, -1)
        self.k_up_HNC, self.v_up_HVC = self.up_HEC.split((attention.nope_dim, attention.v_dim), 1)
        self.o = ops.projection(weights.take(f"{prefix}o_proj.weight", axis=1, shard=shard))

    def __call__(
        self,
        x_BKD: Tensor,
        own_BKW: Tensor,
        turn_BK: Turn,
        rows: LayerRows,
    ) -> Tensor:
        """own_BKW: the block's own rows. rows: the context."""
        q = self.q_b(self.ops.rms_norm(self.q_a(x_BKD), self.q_norm, self.eps))
        q_BKHE = q.unflatten(-1, (self.n_heads, -1))
        plain, rotary = q_BKHE.split((self.spec.nope_dim, self.spec.rope_dim), -1)
        absorbed = torch.einsum("bkhn,hnc->bkhc", plain, self.k_up_HNC)
        q_BKHW = torch.cat((absorbed, turn_BK(rotary)), -1)
        keys_BMW = torch.cat((rows.values, own_BKW), 1)
        scores = q_BKHW.flatten(1, 2) @ keys_BMW.transpose(1, 2)
        weights = _softmax(scores * self.scale, rows.seen_BM)
        o_BKHC = (weights @ keys_BMW[..., : self.spec.kv_lora_rank]).unflatten(1, q_BKHW.shape[1:3])
        return self.o(torch.einsum("bkhc,hvc->bkhv", o_BKHC, self.v_up_HVC).flatten(2))


class HeadAttention:
    """Attention of one GQA layer; returns a partial sum over the shard group."""

    def __init__(
        self,
        spec: DraftSpec,
        attention: GqaDraft,
        shard: Shard,
        ops: DenseOps,
        weights: Weights,
        prefix: str,
    ) -> None:
        self.eps, self.scale, self.ops = spec.eps, spec.scale, ops
        self.head_dim = attention.head_dim
        self.n_kv_heads = shard.size(attention.n_kv_heads)
        self.q = ops.projection(weights.take(f"{prefix}q_proj.weight", shard=shard))
        self.norm = weights.take(f"{prefix}q_norm.weight")
        self.o = ops.projection(weights.take(f"{prefix}o_proj.weight", axis=1, shard=shard))

    def __call__(self, x_BKD: Tensor, own: Tensor, turn_BK: Turn, rows: LayerRows) -> Tensor:
        """own: the block's keys and values [B, K, H, 2, dim]. rows: the context."""
        q = self.q(x_BKD).unflatten(-1, (-1, self.head_dim))
        q = turn_BK(self.ops.rms_norm(q, self.norm, self.eps))
        q_BHQE = q.unflatten(2, (self.n_kv_heads, -1)).movedim(1, 3).flatten(2, 3)
        both = torch.cat((rows.values, own), 1)
        k_BHME, v_BHME = both[..., 0, :].transpose(1, 2), both[..., 1, :].transpose(1, 2)
        scores = q_BHQE @ k_BHME.transpose(2, 3)
        o = _softmax(scores * self.scale, rows.seen_BM.unsqueeze(1)) @ v_BHME
        o_BKHGE = o.unflatten(2, (-1, q.shape[1])).movedim(3, 1)
        return self.o(o_BKHGE.flatten(2))


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Context of one layer, zero where nothing may be read. seen_BM: context, then the block's own slots."""

    values: Tensor
    seen_BM: Tensor


def _softmax(scores: Tensor, seen_BM: Tensor) -> Tensor:
    """Over the last axis; what is not seen gets exactly nothing."""
    wider = scores.to(wide(scores.dtype))
    hidden = ~seen_BM.unsqueeze(-2)
    return wider.masked_fill(hidden, float("-inf")).softmax(-1).to(scores.dtype)
