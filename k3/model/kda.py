"""Kimi Delta Attention layer: projections, short convolution, gate, recurrence, gated output norm.

The input projections are one matrix: q, k, v interleaved per head (so that a head's convolution
window is one piece, as in the pools), then the low-rank or full output gate, the decay gate's first
factor and beta. State and window are continued from a read slot and left in a write slot.

Letters: T tokens, B rows, G group tokens, D hidden size, H heads of this rank, K head dim, w conv width.
"""

from __future__ import annotations

import torch
from k3_kernels.api import Ops
from k3_kernels.layers import KdaLayer, kda_block
from k3_kernels.reference.group import ChunkSpan, GroupCache, GroupRule
from torch import Tensor

from k3.model.batch import ChunkBatch, StageCaches, VerifyBatch
from k3.model.layers import wide
from k3.model.spec import QK_NORM_EPS, K3Spec
from k3.model.weights import Weights
from k3.parallel.mesh import Place


class Kda:
    """One layer's attention; returns a partial sum over the shard group."""

    def __init__(
        self, spec: K3Spec, place: Place, ops: Ops, weights: Weights, layer: int, prefix: str
    ) -> None:
        """prefix: `model.layers.{layer}.self_attn.`."""
        self.spec = spec.kda
        self.eps = spec.rms_norm_eps
        self.ops, self.dense = ops.kda, ops.dense
        self.layer = layer
        shard = place.shard
        heads, dim = shard.size(spec.kda.n_heads), spec.kda.head_dim
        self.n_heads, self.head_dim = heads, dim
        acc = wide(weights.dtype)

        parts = [weights.take(f"{prefix}{s}_proj.weight", shard=shard) for s in ("q", "k", "v")]
        qkv = torch.stack([part.view(heads, dim, -1) for part in parts], 1).flatten(0, 2)
        if spec.kda.full_rank_gate:
            gate = weights.take(f"{prefix}g_proj.weight", shard=shard)
        else:
            gate = weights.take(f"{prefix}g_a_proj.weight")
            g_b = weights.take(f"{prefix}g_b_proj.weight", shard=shard)
            self.g_b = ops.dense.projection(g_b)
        f_a = weights.take(f"{prefix}f_a_proj.weight")
        beta = weights.take(f"{prefix}b_proj.weight", shard=shard)
        self.entry = ops.dense.projection(torch.cat((qkv, gate, f_a, beta)))
        self.widths = (qkv.shape[0], gate.shape[0], f_a.shape[0], beta.shape[0])
        self.f_b = ops.dense.projection(weights.take(f"{prefix}f_b_proj.weight", shard=shard))

        convs = [
            weights.take(f"{prefix}{s}_conv1d.weight", shard=shard, dtype=acc)
            for s in ("q", "k", "v")
        ]
        conv_HSKw = torch.stack([c.reshape(heads, dim, -1) for c in convs], 1)
        # Stored tap by tap, so that a kernel reads a tap of all channels at once.
        conv_HSKw = conv_HSKw.transpose(-1, -2).contiguous().transpose(-1, -2)
        # A_log may be zero-padded: cut to the real heads before splitting.
        a_log = weights.take(f"{prefix}A_log", dtype=acc).flatten()[: spec.kda.n_heads]
        self.rule = GroupRule(
            conv_HSDw=conv_HSKw,
            bias_HD=weights.take(f"{prefix}dt_bias", shard=shard, dtype=acc).view(heads, dim),
            decay_H=a_log[shard.of(spec.kda.n_heads)].exp(),
            lower_bound=spec.kda.gate_lower_bound,
            eps=QK_NORM_EPS,
        )
        ops.kda.require(dim, conv_HSKw.shape[-1], weights.dtype)
        self.o_norm = weights.take(f"{prefix}o_norm.weight", dtype=acc)
        o_proj = weights.take(f"{prefix}o_proj.weight", axis=1, shard=shard)
        self.o_proj = ops.dense.projection(o_proj)
        low_rank = None if spec.kda.full_rank_gate else self.g_b
        whole = KdaLayer(
            *(self.entry, self.widths, low_rank, self.f_b, self.rule, self.o_norm),
            *(self.eps, self.o_proj),
        )
        self.block = kda_block(ops.kda, whole)

    def _enter(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Convolution input [T, H, 3, K], output gate [T, H, K], raw decay gate [T, H, K], raw beta [T, H]."""
        u, gate, f_a, beta = self.entry(x_TD).split(self.widths, -1)
        if not self.spec.full_rank_gate:
            gate = self.g_b(gate)
        heads = (-1, self.n_heads, self.head_dim)
        u_THSK = u.view(-1, self.n_heads, 3, self.head_dim)
        return u_THSK, gate.view(heads), self.f_b(f_a).view(heads), beta

    def _leave(self, o_THK: Tensor, gate_THK: Tensor) -> Tensor:
        o = self.dense.gated_rms_norm(o_THK, gate_THK, self.o_norm, self.eps)
        return self.o_proj(o.flatten(1))

    def chunk(self, x_TD: Tensor, caches: StageCaches, batch: ChunkBatch) -> Tensor:
        """Each request continues from its read slot (-1: zeros) and leaves its write slot."""
        u, gate, raw, beta = self._enter(x_TD)
        ends = zip(batch.cu_lens, batch.cu_lens[1:], strict=False)
        slots = zip(batch.read_slots, batch.write_slots, strict=True)
        spans = [ChunkSpan(*end, *slot) for end, slot in zip(ends, slots, strict=True)]
        return self._leave(
            self.ops.chunks(u, raw, beta, self.rule, self._cache(caches), spans), gate
        )

    def verify(self, x_TD: Tensor, caches: StageCaches, batch: VerifyBatch) -> Tensor:
        """One group per row from its read column; what every token of it may leave behind stays until the next."""
        if self.block is not None and len(x_TD) <= self.block.most_tokens:
            slots = batch.state_slots_B, batch.read_column_B
            return self.block(x_TD, batch.group, self._cache(caches), *slots)
        u, gate, raw, beta = self._enter(x_TD)
        rows = (-1, batch.group)
        o = self.ops.group(
            u.unflatten(0, rows),
            raw.unflatten(0, rows),
            beta.unflatten(0, rows),
            self.rule,
            self._cache(caches),
            batch.state_slots_B,
            batch.read_column_B,
        )
        return self._leave(o.flatten(0, 1), gate)

    def _cache(self, caches: StageCaches) -> GroupCache:
        return GroupCache(
            caches.states[self.layer],
            caches.windows[self.layer],
            caches.tails[self.layer],
            caches.columns,
            caches.records.get(self.layer),
        )
