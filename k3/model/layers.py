"""Pieces shared by all layers: dtypes, gated MLP, embedding and head.

Letters: T tokens, D hidden size, F inner width of this rank, V vocabulary of this rank.
A column-parallel matrix holds a range of outputs, a row-parallel one a range of inputs; the sum over
the shard group follows the row-parallel one.
"""

from __future__ import annotations

from functools import partial

import torch
from k3_kernels.api import DenseOps
from k3_kernels.layers import Slices
from k3_kernels.reference.precision import wide
from torch import Tensor
from torch.nn.functional import embedding

from k3.errors import ModelError
from k3.model.spec import SituSpec
from k3.model.weights import Weights
from k3.parallel.collectives import Collectives
from k3.parallel.mesh import Shard

__all__ = ["Embedding", "GatedMlp", "Head", "torch_dtype", "wide"]

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`. Raises ModelError for one the model does not run in."""
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r}: the model runs in {', '.join(DTYPES)}")
    return DTYPES[name]


class GatedMlp:
    """down(situ(gate x, up x)); dense and shared-expert form. Returns a partial sum over the shard group."""

    def __init__(
        self, weights: Weights, prefix: str, situ: SituSpec, shard: Shard, ops: DenseOps
    ) -> None:
        gate = weights.take(f"{prefix}gate_proj.weight", shard=shard)
        up = weights.take(f"{prefix}up_proj.weight", shard=shard)
        self.gate_up = ops.projection(torch.cat((gate, up)))  # D -> 2F
        self.down = ops.projection(weights.take(f"{prefix}down_proj.weight", axis=1, shard=shard))
        self.situ, self.ops = situ, ops

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Partial output of this rank's inner width."""
        return self.tail(self.gate_up(x_TD))

    def tail(self, gate_up_TF: Tensor) -> Tensor:
        """From the joint gate and up projection [T, 2F] on; callers may fuse that projection."""
        return self.down(self.ops.situ(gate_up_TF, self.situ.beta, self.situ.linear_beta))


class Embedding:
    """Token table, rows split over the shard group."""

    def __init__(self, weights: Weights, vocab_size: int, shard: Shard, comm: Collectives) -> None:
        self.table_VD = weights.take("model.embed_tokens.weight", shard=shard)
        self.rows = shard.of(vocab_size)
        self.comm = comm

    def __call__(self, ids_T: Tensor) -> Tensor:
        """Rows of the table, [T, D]. Ids outside 0..vocab-1 are a bug of the caller."""
        if self.comm.size == 1:
            return embedding(ids_T, self.table_VD)
        local = ids_T - self.rows.start
        elsewhere = (local < 0) | (local >= self.table_VD.shape[0])
        x = embedding(local.masked_fill(elsewhere, 0), self.table_VD)
        return self.comm.all_reduce(x.masked_fill(elsewhere.unsqueeze(-1), 0))


class Head:
    """Hidden rows to logits. A rank computes those of its slice of the vocabulary."""

    def __init__(self, table_VD: Tensor, comm: Collectives, ops: DenseOps) -> None:
        """table_VD: this rank's rows of lm_head (or of the tied embedding)."""
        self.projection = ops.projection(table_VD)
        self.comm = comm
        self.slices = Slices(comm.rank * len(table_VD), partial(comm.all_gather, dim=1))

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, vocab], wide dtype, equal on every rank of the shard group."""
        logits_TV = self.whole(self.projection(hidden_TD))
        return logits_TV.to(wide(logits_TV.dtype))

    def whole(self, logits_TV: Tensor) -> Tensor:
        """All logits in the model's dtype, from those of this rank's slice."""
        return self.comm.all_gather(logits_TV, -1)

    def best(self, logits_TV: Tensor) -> Tensor:
        """Ids [T] of the first of the best tokens, equal on every rank, from the logits of this rank's slice."""
        value_T, id_T = logits_TV.max(-1)
        id_T = id_T + self.slices.first
        pair_T12 = torch.stack((value_T.double(), id_T.double()), -1).unsqueeze(1)
        value_TR, id_TR = self.slices.gather(pair_T12).unbind(-1)
        return id_TR.gather(1, value_TR.argmax(1, keepdim=True)).squeeze(1).long()
