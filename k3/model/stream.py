"""The residual stream of a step: what sublayers read, and what they add.

Outputs wait until the next sublayer reads, so that where the operations offer it (`ops.read`) adding them, the mixture
and the norm are one pass over the stream. A frame that leaves the stage has everything added.

Letters: T tokens, D hidden size.
"""

from __future__ import annotations

from k3_kernels.api import Ops
from k3_kernels.reference import attnres
from torch import Tensor

from k3.model.attnres import MixingSite
from k3.parallel.frame import Frame


class Stream:
    """A frame, how many blocks of its bank are filled, and the last sublayer's outputs."""

    def __init__(self, frame: Frame, n_blocks: int, ops: Ops, eps: float) -> None:
        """n_blocks: banked by the stages before; eps: of all norms."""
        self.frame, self.n_blocks = frame, n_blocks
        self.ops, self.eps = ops, eps
        self._outputs: tuple[Tensor, ...] = ()

    def read(self, site: MixingSite | None, norm_D: Tensor) -> Tensor:
        """Input of a sublayer, [T, D]: the site's mixture (None: the residual), normalised. Adds what waits."""
        if self.ops.read is None:
            return self.ops.dense.rms_norm(self.mixture(site), norm_D, self.eps)
        outputs, self._outputs = self._outputs, ()
        blocks = 0 if site is None else self.n_blocks
        score = None if site is None else site.score_D
        candidates = self.frame.candidates_TJH(blocks)
        return self.ops.read(candidates, outputs, score, norm_D, self.eps)

    def mixture(self, site: MixingSite | None) -> Tensor:
        """What `read` normalises, [T, D]. Adds what waits."""
        self.settle()
        return self.frame.hidden_TH if site is None else site(self.frame, self.n_blocks)

    def add(self, *outputs: Tensor) -> None:
        """Outputs of a sublayer, in order; each [T, D], complete on every rank of the stage."""
        self.settle()
        self._outputs = outputs

    def open_block(self, output_TD: Tensor) -> None:
        """Bank the residual; the next one begins with `output_TD`."""
        self.settle()
        residual = self.frame.hidden_TH
        self.frame.bank_TH(self.n_blocks).copy_(residual)
        residual.copy_(output_TD)
        self.n_blocks += 1

    def settle(self) -> None:
        """Add what waits."""
        outputs, self._outputs = self._outputs, ()
        attnres.add(self.frame.hidden_TH, outputs)
