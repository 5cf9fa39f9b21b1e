"""Gated NoPE multi-head latent attention: expanded form for chunks, absorbed form for verify groups.

Cached per token: the normalised latent and the shared key dims, nothing positional. Queries are
computed for the heads of `place.query_shard`; gate, value up-projection and output for those of
`place.shard`. With a context-parallel group the partial outputs are exchanged and merged, in one of
three ways that agree because a merge is linear:
`latent`: each rank gets its own heads' latents and projects those heads only;
`value`: projected before, which sends C / V times fewer bytes and reads all heads' value weights;
`gather`: values of all heads to every rank of the stage, which then holds gate and output projection
whole: its result is complete, and the layer has one message where the others need a second to add up.

Letters: T tokens, D hidden size, H query heads, J output heads of this rank, N + R query dims,
C latent width, K = C + R, V value dims, X = C or V, F ranks of the stage.
"""

from __future__ import annotations

import torch
from k3_kernels.api import Ops
from k3_kernels.layers import MlaLayer, mla_block
from k3_kernels.reference.mla import DecodePlan
from torch import Tensor

from k3.errors import ModelError
from k3.model.batch import ChunkBatch, VerifyBatch
from k3.model.spec import LORA_NORM_EPS, K3Spec
from k3.model.weights import Weights
from k3.parallel.collectives import Groups
from k3.parallel.mesh import WHOLE, Place, Shard

EXCHANGES = ("value", "latent", "gather")


class Mla:
    """One layer's attention, complete on every rank of the shard group."""

    def __init__(
        self,
        spec: K3Spec,
        place: Place,
        groups: Groups,
        ops: Ops,
        weights: Weights,
        prefix: str,
        exchange: str = "value",
    ) -> None:
        """prefix: `model.layers.{i}.self_attn.`. exchange: `value`, `latent` or `gather`, see above."""
        if exchange not in EXCHANGES:
            raise ModelError(f"exchange={exchange!r}: expected one of {', '.join(EXCHANGES)}")
        self.spec = spec.mla
        self.ops, self.dense = ops.attention, ops.dense
        self.context, self.shard, self.tp = groups.context, groups.shard, place.mesh.tp
        self.exchange = exchange
        self.gathers = exchange == "gather" and self.context.size > 1
        mla, query, out = spec.mla, place.query_shard, WHOLE if self.gathers else place.shard
        self.n_heads, self.n_out = query.size(mla.n_heads), out.size(mla.n_heads)

        entries = [weights.take(f"{prefix}kv_a_proj_with_mqa.weight")]
        if mla.q_lora_rank is None:
            entries.append(weights.take(f"{prefix}q_proj.weight", shard=query))
        else:
            entries.append(weights.take(f"{prefix}q_a_proj.weight"))
            self.q_norm = weights.take(f"{prefix}q_a_layernorm.weight")
            q_b = weights.take(f"{prefix}q_b_proj.weight", shard=query)
            self.q_b = ops.dense.projection(q_b)
        if mla.output_gate:
            entries.append(weights.take(f"{prefix}g_proj.weight", shard=out))
        self.widths = tuple(entry.shape[0] for entry in entries)
        self.entry = ops.dense.projection(
            torch.cat(entries)
        )  # one projection of the input: latent, query, gate
        self.kv_norm = weights.take(f"{prefix}kv_a_layernorm.weight")
        o_proj = weights.take(f"{prefix}o_proj.weight", axis=1, shard=out)
        self.o_proj = ops.dense.projection(o_proj)

        kv_up = weights.take(f"{prefix}kv_b_proj.weight", shard=query)
        self.kv_up_HDC = kv_up.view(self.n_heads, mla.nope_dim + mla.v_dim, mla.kv_lora_rank)
        self.k_up_HNC = self.kv_up_HDC[:, : mla.nope_dim]
        own = Shard(place.cp_rank, place.mesh.cp).of(self.n_heads)
        projected = own if exchange == "latent" else slice(None)
        self.v_up_HCV = self.kv_up_HDC[projected, mla.nope_dim :].transpose(1, 2)
        self.block = None
        if self.context.size == 1:
            self.block = mla_block(ops.attention, self._whole())

    def _whole(self) -> MlaLayer:
        mla = self.spec
        has_factor = mla.q_lora_rank is not None
        return MlaLayer(
            *(self.entry, self.widths, self.kv_norm),
            self.q_norm if has_factor else None,
            self.q_b if has_factor else None,
            *(self.kv_up_HDC, mla.nope_dim, mla.rope_dim, mla.scale, LORA_NORM_EPS, self.o_proj),
        )

    def _enter(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries [T, H, N + R], latent rows [T, K], gate [T, J * V] or None."""
        latent, query, *gate = self.entry(x_TD).split(self.widths, -1)
        rank = self.spec.kv_lora_rank
        normed = self.dense.rms_norm(latent[:, :rank], self.kv_norm, LORA_NORM_EPS)
        if self.spec.q_lora_rank is not None:
            query = self.q_b(self.dense.rms_norm(query, self.q_norm, LORA_NORM_EPS))
        query_THD = query.view(-1, self.n_heads, self.spec.query_dim)
        return query_THD, torch.cat((normed, latent[:, rank:]), -1), gate[0] if gate else None

    def _leave(self, o_TJV: Tensor, gate: Tensor | None) -> Tensor:
        o = o_TJV.flatten(1)
        y = self.o_proj(o if gate is None else self.dense.gate(o, gate))
        return y if self.gathers else self.shard.all_reduce(y)

    def chunk(self, x_TD: Tensor, latents: Tensor, batch: ChunkBatch) -> Tensor:
        """Write the chunk's latents, then attend causally over everything cached. Needs cp = 1."""
        assert self.context.size == 1, "chunks run where one rank holds all pages"
        query, latent, gate = self._enter(x_TD)
        self.ops.write(latents, batch.slot_T, latent)
        o = self.ops.prefill(
            query,
            latents,
            batch.page_table_RW,
            batch.cu_lens,
            batch.starts,
            self.kv_up_HDC,
            self.spec.scale,
        )
        return self._leave(o, gate)

    def verify(self, x_TD: Tensor, latents: Tensor, batch: VerifyBatch, plan: DecodePlan) -> Tensor:
        """Write the owned latents, attend within the bounds, exchange and merge over context ranks."""
        if self.block is not None and len(x_TD) <= self.block.most_tokens:
            return self.shard.all_reduce(self.block(x_TD, latents, batch.slot_T, plan))
        query, latent, gate = self._enter(x_TD)
        self.ops.write(latents, batch.slot_T, latent)
        q_THK = self._absorb(query)
        o, lse = self.ops.decode(q_THK, latents, plan, self.spec.scale, self.spec.kv_lora_rank)
        if self.context.size == 1:
            o = self._values(o)
        elif self.exchange == "latent":
            o = self._values(self._to_head_owners(o, lse, None))
        elif self.gathers:
            o = self._to_everybody(o, lse)
        else:
            o = self._to_head_owners(o, lse, self.v_up_HCV)
        return self._leave(o, gate)

    def _values(self, o_THC: Tensor) -> Tensor:
        """Up-projection of the heads in `o_THC`: [T, H, V]."""
        return torch.bmm(o_THC.transpose(0, 1), self.v_up_HCV).transpose(0, 1)

    def _absorb(self, query_THD: Tensor) -> Tensor:
        """Queries in the latent's space, shared dims behind: [T, H, K]. The product writes where attention reads."""
        nope, latent = self.spec.nope_dim, self.spec.kv_lora_rank
        q_THK = query_THD.new_empty(*query_THD.shape[:2], latent + self.spec.rope_dim)
        heads_first = q_THK[..., :latent].transpose(0, 1)
        torch.bmm(query_THD[..., :nope].transpose(0, 1), self.k_up_HNC, out=heads_first)
        q_THK[..., latent:] = query_THD[..., nope:]
        return q_THK

    def _to_head_owners(self, o_THC: Tensor, lse_TH: Tensor, up_HCV: Tensor | None) -> Tensor:
        """Partials of all heads over own keys -> merged output of own heads over all keys [T, J, X]."""
        by_rank = self.ops.pack(o_THC, lse_TH, up_HCV, self.context.size)
        return self.ops.merge_packed(self.context.all_to_all(by_rank), o_THC.dtype)

    def _to_everybody(self, o_THC: Tensor, lse_TH: Tensor) -> Tensor:
        """Partials of own heads over own keys -> merged output of the stage's heads over all keys [T, J, X]."""
        message_1THb = self.ops.pack(o_THC, lse_TH, self.v_up_HCV, 1)
        received = self.shard.all_gather(message_1THb, 0)  # [F, T, H, bytes]
        by_context = received.unflatten(0, (self.tp, self.context.size)).movedim(0, 2).flatten(2, 3)
        return self.ops.merge_packed(by_context, o_THC.dtype)
