"""The DSpark drafter: context rows from target taps (prefill and decode), and the block that proposes drafts (decode).

A block of slots `[anchor, MASK ..]` at positions base .. base + k - 1 attends to the context rows before the anchor and
to all its own slots, without a causal mask; slot i predicts position base + 1 + i. A small sequential head corrects
the slots' logits from left to right. Embedding and head are the target's. Rows are computed once per committed token
and never change: normalised, rotated, at absolute positions.

Letters: T tokens, B requests, K slots, X taps, D hidden, H heads of this rank, W row width, V vocabulary, R rank of the
sequential head, L drafter layers. Golden: dspark/drafter_*.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from k3_kernels import drafts, layers
from k3_kernels.api import DenseOps
from torch import Tensor
from torch.nn.functional import linear, silu

from k3.model.draft_attention import (
    HeadAttention,
    HeadRows,
    LatentAttention,
    LatentRows,
    LayerRows,
    Rotation,
    Turn,
)
from k3.model.draft_ring import Context
from k3.model.dspark_spec import CONFIDENCE, SHARED, DraftSpec, GqaDraft, MlaDraft
from k3.model.layers import Head, torch_dtype, wide
from k3.model.weights import TensorSource, Weights, check, open_folder
from k3.parallel.collectives import Collectives
from k3.parallel.mesh import Shard

log = logging.getLogger(__name__)

Choose = Callable[[int, Tensor], Tensor]  # draft i of each request from its logits [B, V]


class DraftContext:
    """Taps of committed tokens to the rows every drafter layer attends to."""

    def __init__(self, spec: DraftSpec, shard: Shard, ops: DenseOps, weights: Weights) -> None:
        self.spec, self.ops = spec, ops
        is_mla = spec.flavour == "mla"
        projection, norm = ("context_proj", "context_norm") if is_mla else ("fc", "hidden_norm")
        listed = weights.take(f"{projection}.weight").unflatten(1, (len(spec.taps), -1))
        ascending = sorted(range(len(spec.taps)), key=spec.taps.__getitem__)
        # taps come in ascending order
        self.projection = ops.projection(listed[:, ascending].flatten(1))
        self.norm = weights.take(f"{norm}.weight")
        self.rotation = Rotation(spec.rope, weights.dtype, weights.device)
        self.layers = [self._rows(shard, weights, layer) for layer in range(spec.num_layers)]
        self.at_once = drafts.context_rows(ops, self.whole())

    def _rows(self, shard: Shard, weights: Weights, layer: int) -> LatentRows | HeadRows:
        prefix = f"layers.{layer}.self_attn."
        match self.spec.attention:
            case MlaDraft() as attention:
                return LatentRows(self.spec, attention, self.ops, weights, prefix)
            case GqaDraft() as attention:
                return HeadRows(self.spec, attention, shard, self.ops, weights, prefix)

    @torch.no_grad()
    def __call__(self, taps_TXD: Tensor, positions_T: Tensor) -> Tensor:
        """Rows of all layers: [T, L, W], or by head [T, H, L, 2, dim]."""
        if self.at_once is not None:
            return self.at_once(taps_TXD, positions_T)
        projected = self.projection(taps_TXD.flatten(1))
        context = self.ops.rms_norm(projected, self.norm, self.spec.eps)
        turn = self.rotation.at(positions_T)
        rows = [layer(context, turn) for layer in self.layers]
        return torch.stack(rows, 1 if self.spec.flavour == "mla" else 2)

    def whole(self) -> drafts.AnyContext:
        """For a backend that writes rows where they lie."""
        ends = (tuple(rows.norm for rows in self.layers), self.rotation.whole(), self.spec.eps)
        heads = [rows for rows in self.layers if isinstance(rows, HeadRows)]
        if heads:
            keys, values = tuple(rows.k for rows in heads), tuple(rows.v for rows in heads)
            return drafts.HeadContext(self.projection, self.norm, keys, values, *ends)
        latent = (rows for rows in self.layers if isinstance(rows, LatentRows))
        return drafts.DraftContext(
            self.projection, self.norm, tuple(rows.down for rows in latent), *ends
        )


class DraftLayer:
    """One pre-norm layer of the block."""

    def __init__(
        self,
        spec: DraftSpec,
        shard: Shard,
        comm: Collectives,
        ops: DenseOps,
        weights: Weights,
        layer: int,
        rows: LatentRows | HeadRows,
        rotation: Rotation,
    ) -> None:
        prefix = f"layers.{layer}."
        self.eps, self.comm, self.ops, self.rows = spec.eps, comm, ops, rows
        self.input_norm = weights.take(f"{prefix}input_layernorm.weight")
        self.mlp_norm = weights.take(f"{prefix}post_attention_layernorm.weight")
        gate = weights.take(f"{prefix}mlp.gate_proj.weight", shard=shard)
        up = weights.take(f"{prefix}mlp.up_proj.weight", shard=shard)
        self.gate_up = ops.projection(torch.cat((gate, up)))
        down = weights.take(f"{prefix}mlp.down_proj.weight", axis=1, shard=shard)
        self.down = ops.projection(down)
        prefix += "self_attn."
        self.attention: LatentAttention | HeadAttention
        self.ring: drafts.RingBlock | None = None
        match spec.attention:
            case MlaDraft() as attention:
                own = LatentAttention(spec, attention, shard, ops, weights, prefix)
                self.attention = own
                assert isinstance(rows, LatentRows), "rows are of the attention's flavour"
                if comm.size == 1:
                    whole = self._whole(spec, own, rows)
                    self.ring = drafts.ring_block(ops, whole, rotation.whole())
            case GqaDraft() as attention:
                heads = HeadAttention(spec, attention, shard, ops, weights, prefix)
                self.attention = heads
                assert isinstance(rows, HeadRows), "rows are of the attention's flavour"
                if comm.size == 1:
                    whole_heads = self._whole_heads(spec, heads, rows)
                    self.ring = drafts.ring_block(ops, whole_heads, rotation.whole())

    def _whole(
        self, spec: DraftSpec, attention: LatentAttention, rows: LatentRows
    ) -> layers.DraftLayer:
        return layers.DraftLayer(
            *(self.input_norm, attention.q_a, attention.q_norm, attention.q_b),
            *(rows.down, rows.norm, attention.up_HEC),
            *(attention.spec.nope_dim, attention.spec.rope_dim, attention.scale),
            *(spec.rope.is_interleaved, attention.o),
            *(self.mlp_norm, self.gate_up, self.down, self.eps),
        )

    def _whole_heads(
        self, spec: DraftSpec, attention: HeadAttention, rows: HeadRows
    ) -> drafts.HeadLayer:
        return drafts.HeadLayer(
            *(self.input_norm, attention.q, attention.norm, rows.k, rows.v, rows.norm),
            *(spec.n_heads, attention.n_kv_heads, attention.head_dim, attention.scale),
            *(attention.o, self.mlp_norm, self.gate_up, self.down, self.eps),
        )

    def __call__(self, x_BKD: Tensor, turn_BK: Turn, context: LayerRows) -> Tensor:
        """The residual after this layer."""
        h = self.ops.rms_norm(x_BKD, self.input_norm, self.eps)
        own = self.rows(h, turn_BK)
        x = x_BKD + self.comm.all_reduce(self.attention(h, own, turn_BK, context))
        gate, up = self.gate_up(self.ops.rms_norm(x, self.mlp_norm, self.eps)).chunk(2, -1)
        return x + self.comm.all_reduce(self.down(silu(gate) * up))


class SequentialHead:
    """The bias each slot's logits get from the token before it; runs from left to right."""

    def __init__(
        self, spec: DraftSpec, ops: DenseOps, weights: Weights, slices: layers.Slices | None
    ) -> None:
        """slices: of the vocabulary, as the target's head has them."""
        acc = wide(weights.dtype)
        self.kind, self.rank = spec.markov_type, spec.markov_rank
        self.table_VR = weights.take("markov_head.markov_w1.weight", dtype=acc)
        self.out = ops.projection(weights.take("markov_head.markov_w2.weight", dtype=acc))
        name = {"gated": "gate_proj", "rnn": "joint_proj"}.get(self.kind)
        if name is not None:
            self.mixer = weights.take(f"markov_head.{name}.weight", dtype=acc)
            self.mixer_bias = weights.take(f"markov_head.{name}.bias", dtype=acc)

        # from logits over the vocabulary, and from those of this rank's slice
        self.best = self.best_of_slices = None
        if name is None:
            whole = layers.DraftHead(self.table_VR, self.out)
            self.best = layers.draft_tokens(ops, whole)
            if slices is not None:
                self.best_of_slices = layers.draft_tokens(ops, whole, slices)

    def start(self, n: int) -> Tensor:
        """Recurrent state before the first slot, [n, R]."""
        return self.table_VR.new_zeros(n, self.rank)

    def __call__(
        self, previous_B: Tensor, hidden_BD: Tensor, state_BR: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Bias [B, V] of one slot and the state after it."""
        e = self.table_VR[previous_B]
        h = hidden_BD.to(e.dtype)
        if self.kind == "gated":
            gate = linear(torch.cat((h, e), -1), self.mixer, self.mixer_bias).sigmoid()
            e = gate * e
        elif self.kind == "rnn":
            z = linear(torch.cat((state_BR, e, h), -1), self.mixer, self.mixer_bias)
            gate, candidate, out = z.chunk(3, -1)
            gate = gate.sigmoid()
            state_BR = gate * state_BR + (1 - gate) * candidate.tanh()
            e = out.tanh()
        return self.out(e), state_BR


class Drafter:
    """The whole drafter. `embed` and `head` are the target's."""

    def __init__(
        self,
        spec: DraftSpec,
        shard: Shard,
        comm: Collectives,
        weights: Weights,
        *,
        draft_tokens: int,
        embed: Callable[[Tensor], Tensor],
        head: Head | Callable[[Tensor], Tensor],
        ops: DenseOps,
        confidence: bool = False,
    ) -> None:
        """draft_tokens: drafts that are kept of each block; the block is computed at its trained width."""
        self.spec, self.draft_tokens, self.ops = spec, draft_tokens, ops
        self.block = spec.block(draft_tokens)
        self.context = DraftContext(spec, shard, ops, weights)
        self.layers = [
            DraftLayer(spec, shard, comm, ops, weights, i, rows, self.context.rotation)
            for i, rows in enumerate(self.context.layers)
        ]
        self.norm = weights.take("final_norm.weight" if spec.flavour == "mla" else "norm.weight")
        slices = head.slices if isinstance(head, Head) else None
        self.sequential = SequentialHead(spec, ops, weights, slices)
        whole = self.context.whole()
        self.rows: drafts.DraftRows | None = None
        if comm.size == 1:
            self.rows = drafts.draft_rows(ops, whole)
        self.embed, self.head, self.comm = embed, head, comm
        self._slots_K = torch.arange(self.block, device=weights.device)
        self._masks = torch.full((1, self.block - 1), spec.mask_token_id, device=weights.device)
        self._has_confidence = confidence
        if confidence:
            acc = wide(weights.dtype)
            self._w = weights.take(f"{CONFIDENCE}proj.weight", dtype=acc)
            self._b = weights.take(f"{CONFIDENCE}proj.bias", dtype=acc)

    @torch.no_grad()
    def hidden(self, context: Context, anchor_B: Tensor, base_B: Tensor) -> Tensor:
        """Finished slots [B, K, D] of blocks whose anchors stand at `base`."""
        x = self._inputs(anchor_B)
        turn_BK = self.context.rotation.at(base_B.unsqueeze(1) + self._slots_K)
        own_BK = context.seen_BN.new_ones(x.shape[:2])
        seen_BM = torch.cat((context.seen_BN, own_BK), 1)
        for i, layer in enumerate(self.layers):
            rows = LayerRows(context.layer(i, self.spec.flavour), seen_BM)
            x = layer(x, turn_BK, rows)
        return self.ops.rms_norm(x, self.norm, self.spec.eps)

    def reads_rings(self, n_rows: int) -> bool:
        """Whether `hidden_over` is called for so many blocks."""
        rings = (layer.ring for layer in self.layers)
        return all(ring is not None and ring.takes(n_rows, self.block) for ring in rings)

    @torch.no_grad()
    def hidden_over(self, view: drafts.DraftView, anchor_B: Tensor) -> Tensor:
        """As `hidden`, over the ring where it lies."""
        x = self._inputs(anchor_B)
        for i, layer in enumerate(self.layers):
            assert layer.ring is not None, "asked of a drafter that reads rings"
            x = layer.ring(x, view, i)
        return self.ops.rms_norm(x, self.norm, self.spec.eps)

    def _inputs(self, anchor_B: Tensor) -> Tensor:
        """Embedded slots [B, K, D]."""
        ids_BK = torch.cat((anchor_B.unsqueeze(1), self._masks.expand(len(anchor_B), -1)), 1)
        return self.embed(ids_BK.flatten()).unflatten(0, ids_BK.shape)

    @torch.no_grad()
    def propose(
        self, context: Context, anchor_B: Tensor, base_B: Tensor, choose: Choose | None = None
    ) -> Tensor:
        """Drafts [B, draft_tokens] for positions base + 1 .., the same on every rank; the best ones by default."""
        hidden_BKD = self.hidden(context, anchor_B, base_B)[:, : self.draft_tokens]
        return self.draft(hidden_BKD, anchor_B, choose)

    @torch.no_grad()
    def draft(self, hidden_BKD: Tensor, anchor_B: Tensor, choose: Choose | None = None) -> Tensor:
        """As `propose`, from the finished slots of the drafts that are wanted."""
        hidden_TD, blocks = hidden_BKD.flatten(0, 1), hidden_BKD.shape[:2]
        if choose is None and self.sequential.best_of_slices is not None:
            assert isinstance(self.head, Head), "slices are those of a head"
            logits_BKV = self.head.projection(hidden_TD).unflatten(0, blocks)
            return self.sequential.best_of_slices(logits_BKV, anchor_B)
        base_logits = self.head(hidden_TD).unflatten(0, blocks)
        if choose is None and self.sequential.best is not None:
            return self.comm.broadcast(self.sequential.best(base_logits, anchor_B))
        drafts: list[Tensor] = []
        previous, state = anchor_B, self.sequential.start(len(anchor_B))
        for i in range(hidden_BKD.shape[1]):
            bias, state = self.sequential(previous, hidden_BKD[:, i], state)
            logits_BV = base_logits[:, i] + bias
            previous = logits_BV.argmax(-1) if choose is None else choose(i, logits_BV)
            drafts.append(previous)
        return self.comm.broadcast(torch.stack(drafts, 1))

    @torch.no_grad()
    def confidence_logits(self, hidden_BKD: Tensor, previous_BK: Tensor) -> Tensor:
        """Logit [B, K] that a draft is accepted given that those before it were."""
        assert self._has_confidence, "the confidence head was not loaded"
        e = self.sequential.table_VR[previous_BK]
        return linear(torch.cat((hidden_BKD.to(e.dtype), e), -1), self._w, self._b).squeeze(-1)


# ------------------------------------------------------------------ loading


def draft_weights(
    spec: DraftSpec,
    source: TensorSource,
    *,
    context_only: bool,
    dtype: str,
    device: torch.device,
    confidence: bool = False,
) -> Weights:
    """This drafter's tensors. Raises ModelError for a missing, unknown or misshapen one.

    Copies of the target's embedding and head are never loaded; a confidence head only when asked for.
    """
    skipped = SHARED if confidence else (*SHARED, CONFIDENCE)
    found = {name: s for name, s in source.shapes().items() if not name.startswith(skipped)}
    ignored = sorted(source.shapes().keys() - found.keys())
    if ignored:
        log.info("drafter tensors that are not used: %s", ", ".join(ignored))
    wanted = spec.tensors(confidence=confidence)
    check(found, wanted, spec.num_layers)
    own = [name for name in wanted if not context_only or is_context(name)]
    return Weights(source, own, torch_dtype(dtype), device)


def is_context(name: str) -> bool:
    """Whether a tensor makes context rows: all that prefill needs of a drafter."""
    parts = ("kv_a_proj_with_mqa", "kv_a_layernorm", "k_proj", "v_proj", "k_norm")
    return name.startswith(("context_proj", "context_norm", "fc.", "hidden_norm")) or any(
        f"self_attn.{part}." in name for part in parts
    )


def open_context(
    folder: Path, shard: Shard, *, dtype: str, device: torch.device, ops: DenseOps
) -> DraftContext:
    """The context writer of the drafter in `folder`. Raises ModelError."""
    spec = DraftSpec.from_folder(folder)
    weights = draft_weights(
        spec, open_folder(folder), context_only=True, dtype=dtype, device=device
    )
    context = DraftContext(spec, shard, ops, weights)
    weights.finish()
    return context


def open_drafter(
    folder: Path,
    shard: Shard,
    comm: Collectives,
    *,
    draft_tokens: int,
    embed: Callable[[Tensor], Tensor],
    head: Head | Callable[[Tensor], Tensor],
    dtype: str,
    device: torch.device,
    ops: DenseOps,
    confidence: bool = False,
) -> Drafter:
    """The drafter in `folder`. Raises ModelError. confidence: with its confidence head."""
    spec = DraftSpec.from_folder(folder)
    weights = draft_weights(
        spec,
        open_folder(folder),
        context_only=False,
        dtype=dtype,
        device=device,
        confidence=confidence,
    )
    drafter = Drafter(
        spec,
        shard,
        comm,
        weights,
        draft_tokens=draft_tokens,
        embed=embed,
        head=head,
        ops=ops,
        confidence=confidence,
    )
    weights.finish()
    return drafter
