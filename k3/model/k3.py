"""`Stage`: the layers one rank owns, run over a frame.

A stage turns the frame it received (none on the first stage: it embeds the tokens) into the frame the
next stage receives; on the last stage that frame holds the final residual, the whole bank and all
taps, and `hidden` and `logits` finish the rows that are asked for. The same call serves pp = 1.

Letters: T tokens, N rows asked for, D hidden size, X taps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from k3_kernels.api import Ops
from k3_kernels.reference.mla import DecodePlan
from torch import Tensor

from k3.model.attnres import MixingSite
from k3.model.batch import Batch, ChunkBatch, StageCaches, VerifyBatch
from k3.model.kda import Kda
from k3.model.layers import Embedding, GatedMlp, Head
from k3.model.mla import Mla
from k3.model.moe import Moe
from k3.model.names import expert_of, layer_of, layer_prefix
from k3.model.spec import K3Spec
from k3.model.stream import Stream
from k3.model.weights import Weights
from k3.parallel.collectives import Groups
from k3.parallel.frame import EMBEDDING_TAP, Frame, frame_layout
from k3.parallel.mesh import Place


class StageOutput(NamedTuple):
    """What a stage leaves: the frame for the next stage, and the taps in it, [T, X, D] ascending."""

    frame: Frame
    taps_TXD: Tensor


class Layer:
    """One layer: two sublayers, each behind its mixing site and norm."""

    def __init__(
        self,
        spec: K3Spec,
        place: Place,
        groups: Groups,
        ops: Ops,
        weights: Weights,
        layer: int,
        moe_weights: str,
        exchange: str,
    ) -> None:
        self.index = layer
        self.comm = groups.shard
        prefix = layer_prefix(layer)
        block = spec.attn_res_block
        self.opens_block = block is not None and layer % block == 0
        self.attention_site = self.ffn_site = None
        if block is not None:
            self.attention_site = MixingSite(
                weights, f"{prefix}self_attention_res", spec.rms_norm_eps, ops.mix
            )
            self.ffn_site = MixingSite(weights, f"{prefix}mlp_res", spec.rms_norm_eps, ops.mix)
        self.input_norm = weights.take(f"{prefix}input_layernorm.weight")
        self.ffn_norm = weights.take(f"{prefix}post_attention_layernorm.weight")
        attention = f"{prefix}self_attn."
        self.attention: Mla | Kda
        if spec.is_mla(layer):
            self.attention = Mla(spec, place, groups, ops, weights, attention, exchange)
        else:
            self.attention = Kda(spec, place, ops, weights, layer, attention)
        self.ffn: Moe | GatedMlp
        if spec.is_moe(layer):
            self.ffn = Moe(spec, place, groups.shard, ops, weights, layer, moe_weights)
        else:
            self.ffn = GatedMlp(weights, f"{prefix}mlp.", spec.situ, place.shard, ops.dense)

    def run(
        self, stream: Stream, caches: StageCaches, batch: Batch, plan: DecodePlan | None
    ) -> None:
        """Both sublayers: each reads the stream and adds to it."""
        x = stream.read(self.attention_site, self.input_norm)
        attended = self._attend(x, caches, batch, plan)
        if self.opens_block:
            stream.open_block(attended)
        else:
            stream.add(attended)
        stream.add(*self._feed_forward(stream.read(self.ffn_site, self.ffn_norm)))

    def _attend(
        self, x_TD: Tensor, caches: StageCaches, batch: Batch, plan: DecodePlan | None
    ) -> Tensor:
        """[T, D], complete on every rank of the stage."""
        match self.attention, batch:
            case Mla() as mla, ChunkBatch():
                return mla.chunk(x_TD, caches.latents[self.index], batch)
            case Mla() as mla, VerifyBatch():
                assert plan is not None
                return mla.verify(x_TD, caches.latents[self.index], batch, plan)
            case Kda() as kda, ChunkBatch():
                return self.comm.all_reduce(kda.chunk(x_TD, caches, batch))
            case Kda() as kda, VerifyBatch():
                return self.comm.all_reduce(kda.verify(x_TD, caches, batch))
        raise AssertionError("unreachable: every layer is MLA or KDA, every batch chunk or verify")

    def _feed_forward(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        if isinstance(self.ffn, Moe):
            return self.ffn(x_TD)
        return (self.comm.all_reduce(self.ffn(x_TD)),)


class Stage:
    """This rank's share of the model. Build it with `k3.model.registry.open_stage`."""

    def __init__(
        self,
        spec: K3Spec,
        place: Place,
        groups: Groups,
        ops: Ops,
        weights: Weights,
        *,
        moe_weights: str = "dequant",
        exchange: str = "value",
        taps: tuple[int, ...] = (),
        tap_stream: str = "prefix",
        shared_embedding: bool = False,
    ) -> None:
        """Takes this stage's tensors from `weights`.

        exchange: what context-parallel ranks of an MLA layer send each other, `value`, `latent` or `gather`.
        taps: layer ids captured over the whole pipeline (-1: embedding); `frame_layout` has the rules.
        shared_embedding: load the token table on the last stage too, for a drafter.
        """
        self.spec, self.place, self.groups, self.ops = spec, place, groups, ops
        self.dtype, self.device = weights.dtype, weights.device
        self.layer_range = place.mesh.stage_layers(spec.num_layers)[place.stage]
        self.taps, self.tap_stream = tuple(sorted(taps)), tap_stream
        first, after = self.layer_range.start, self.layer_range.stop
        self.in_layout = frame_layout(spec, first, taps, tap_stream)
        self.out_layout = frame_layout(spec, after, taps, tap_stream)
        self.embed = None
        if place.is_first or (shared_embedding and place.is_last):
            self.embed = Embedding(weights, spec.vocab_size, place.shard, groups.shard)
        self.layers = [
            Layer(spec, place, groups, ops, weights, i, moe_weights, exchange)
            for i in self.layer_range
        ]
        self.has_mla = any(isinstance(layer.attention, Mla) for layer in self.layers)
        self.head = None
        if place.is_last:
            self._load_head(weights)

    def _load_head(self, weights: Weights) -> None:
        spec = self.spec
        table = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
        own = weights.take(table, shard=self.place.shard)
        self.head = Head(own, self.groups.shard, self.ops.dense)
        self.final_norm = weights.take("model.norm.weight")
        self.output_site = None
        if spec.attn_res_block is not None:
            self.output_site = MixingSite(
                weights, "model.output_attn_res", spec.rms_norm_eps, self.ops.mix
            )

    @torch.no_grad()
    def forward(self, incoming: Frame | None, caches: StageCaches, batch: Batch) -> StageOutput:
        """Run the stage's layers over one batch, updating the caches.

        incoming: frame of the stage before (layout `in_layout`), None on the first stage.
        Returns a new frame of layout `out_layout`.
        """
        frame = Frame.empty(self.out_layout, batch.n_tokens, self.dtype, self.device)
        self._open(frame, incoming, batch)
        plan = self._plan(caches, batch)
        stream = Stream(frame, self.in_layout.bank, self.ops, self.spec.rms_norm_eps)
        for layer in self.layers:
            self._tap_mixture(stream, layer.index - 1, layer.attention_site)
            layer.run(stream, caches, batch, plan)
            self._tap_residual(stream, layer.index)
        stream.settle()
        if self.place.is_last and self.tap_stream == "mixture":
            last = self.spec.num_layers - 1
            if last in self.taps:
                frame.tap_TH(last).copy_(
                    self._output_mixture(frame.candidates_TJH(stream.n_blocks))
                )
        return StageOutput(frame, frame.taps_TXH)

    def _open(self, frame: Frame, incoming: Frame | None, batch: Batch) -> None:
        if not self.place.is_first:
            assert incoming is not None, "a later stage needs the frame of the stage before"
            frame.take_over(incoming)
            return
        assert incoming is None, "the first stage embeds the tokens itself"
        assert self.embed is not None
        frame.hidden_TH.copy_(self.embed(batch.token_ids_T))
        if EMBEDDING_TAP in self.taps:
            frame.tap_TH(EMBEDDING_TAP).copy_(frame.hidden_TH)

    def _plan(self, caches: StageCaches, batch: Batch) -> DecodePlan | None:
        if not self.has_mla or isinstance(batch, ChunkBatch):
            return None
        page_tokens = next(iter(caches.latents.values())).shape[1]
        return self.ops.attention.plan(
            batch.page_table_BW, batch.bound_T, batch.group, batch.max_bound, page_tokens
        )

    def _tap_mixture(self, stream: Stream, completed: int, site: MixingSite | None) -> None:
        if self.tap_stream == "mixture" and completed >= 0 and completed in self.taps:
            stream.frame.tap_TH(completed).copy_(stream.mixture(site))

    def _tap_residual(self, stream: Stream, completed: int) -> None:
        if self.tap_stream == "prefix" and completed in self.taps:
            stream.settle()
            stream.frame.tap_TH(completed).copy_(stream.frame.hidden_TH)

    def _output_mixture(self, candidates_TJD: Tensor) -> Tensor:
        if self.output_site is None:
            return candidates_TJD[:, 0]
        return self.output_site.rows(candidates_TJD)

    @torch.no_grad()
    def hidden(self, frame: Frame, rows_N: Tensor | None = None) -> Tensor:
        """Last stage: normalised final hidden state of the asked rows (None: all), [N, D]."""
        assert self.head is not None, "only the last stage finishes rows"
        candidates = frame.candidates_TJH(self.out_layout.bank)
        if rows_N is not None:
            candidates = candidates.index_select(0, rows_N)
        mixture = self._output_mixture(candidates)
        return self.ops.dense.rms_norm(mixture, self.final_norm, self.spec.rms_norm_eps)

    @torch.no_grad()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Last stage: logits [N, vocab] in float32 (float64 models: float64)."""
        assert self.head is not None, "only the last stage holds the head"
        return self.head(hidden_ND)


def stage_tensor_names(
    spec: K3Spec, place: Place, names: frozenset[str], shared_embedding: bool
) -> set[str]:
    """Of all `names` of the model, those this rank takes something of."""
    layers = place.mesh.stage_layers(spec.num_layers)[place.stage]
    experts = range(spec.moe.n_experts)[place.shard.of(spec.moe.n_experts)]
    own = {
        name
        for name in names
        if layer_of(name) in layers and (expert_of(name) is None or expert_of(name) in experts)
    }
    if place.is_first or (shared_embedding and place.is_last):
        own.add("model.embed_tokens.weight")
    if place.is_last:
        own |= {n for n in names if n.startswith(("model.norm", "model.output", "lm_head"))}
        if spec.tied_embeddings:
            own.add("model.embed_tokens.weight")
    return own
