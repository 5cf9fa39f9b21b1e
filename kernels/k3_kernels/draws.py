"""Drawing tokens from scores, for backends that do it in fewer passes than torch. Rules: `k3.sampling.Recipe.draw`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


class Draw(Protocol):
    """One token per row of scores."""

    def __call__(
        self,
        scores_BGV: Tensor,
        reals_B3: Tensor,
        whole_B4: Tensor,
        position_BG: Tensor,
        *,
        limited: bool,
    ) -> Tensor:
        """Ids [B, G]. reals, whole: as `k3.sampling.Params` has them; position: absolute, of the token to draw.

        scores: as the model has them or wider. limited: whether any request has top_k or top_p.
        """
        ...


@runtime_checkable
class _Draws(Protocol):
    def draw(self) -> Draw: ...


def draw(ops: object) -> Draw | None:
    """What the dense operations `ops` offer; None: by torch."""
    return ops.draw() if isinstance(ops, _Draws) else None
