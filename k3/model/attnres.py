"""Block attention residuals: a mixing site, and the plain residual stream when the model has none.

A site chooses a softmax mixture of the running residual and the banked blocks; the bank and the
residual are columns of the frame (`k3/parallel/frame.py`), so a mixture reads them in place.
"""

from __future__ import annotations

from k3_kernels.api import MixOp
from torch import Tensor

from k3.model.layers import wide
from k3.model.weights import Weights
from k3.parallel.frame import Frame


class MixingSite:
    """One site's fused score vector (norm weight times projection)."""

    def __init__(self, weights: Weights, name: str, eps: float, mix: MixOp) -> None:
        """name: tensor name up to `_norm.weight` / `_proj.weight`."""
        acc = wide(weights.dtype)
        norm = weights.take(f"{name}_norm.weight", dtype=acc)
        self.score_D = norm * weights.take(f"{name}_proj.weight", dtype=acc)[0]
        self.eps = eps
        self.mix = mix

    def __call__(self, frame: Frame, n_blocks: int) -> Tensor:
        """[T, D]; the residual itself while the bank is empty."""
        if n_blocks == 0:
            return frame.hidden_TH
        return self.mix(frame.candidates_TJH(n_blocks), self.score_D, self.eps)

    def rows(self, candidates_TJH: Tensor) -> Tensor:
        """The mixture of given candidates."""
        return self.mix(candidates_TJH, self.score_D, self.eps)
