"""Drawing tokens by the native library: `k3_kernels.draws`."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.cpu.calls import pair
from k3_kernels.reference.precision import wide


class NativeDraw:
    """`draws.Draw`: one call. Scores of other dtypes are widened to float32."""

    def __init__(self) -> None:
        """Raises LibraryError."""
        self._calls = pair("k3_draw")

    def __call__(
        self,
        scores_BGV: Tensor,
        reals_B3: Tensor,
        whole_B4: Tensor,
        position_BG: Tensor,
        *,
        limited: bool,
    ) -> Tensor:
        """[B, G]."""
        n_rows, group, vocabulary = scores_BGV.shape
        scores = scores_BGV.flatten(0, 1).to(wide(scores_BGV.dtype))
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        reals, whole, position = (x.contiguous() for x in (reals_B3, whole_B4, position_BG))
        assert (reals.dtype, reals.shape) == (torch.float64, (n_rows, 3)), reals
        assert (whole.dtype, whole.shape) == (torch.int64, (n_rows, 4)), whole
        assert (position.dtype, position.shape) == (torch.int64, (n_rows, group)), position
        drawn_BG = torch.empty_like(position)
        self._calls[scores.dtype](
            *(scores.data_ptr(), scores.stride(0), reals.data_ptr(), whole.data_ptr()),
            *(position.data_ptr(), drawn_BG.data_ptr(), n_rows, group, vocabulary),
        )
        return drawn_BG
