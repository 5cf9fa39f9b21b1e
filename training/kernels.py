"""The two cross-token operations of training: KDA recurrence and causal attention over packed documents.

`Kernels` has a plain torch reference (CPU: the smoke run and the tests) and the GPU form (fla-core's chunked
KDA and torch's variable-length flash attention). Both see one flat stream `[N, heads, dim]` cut at `starts`.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Where documents lie in the flat stream.

    starts [n_docs + 1] int32 on the device, starts_cpu int64 on the host, position [N] int64 within the document.
    """

    starts: Tensor
    starts_cpu: Tensor
    position: Tensor
    longest: int

    @staticmethod
    def of(starts: Tensor, device: torch.device) -> "Layout":
        """Layout of cumulative lengths `starts` (host, any integer type)."""
        cpu = starts.to(torch.int64)
        lengths = cpu[1:] - cpu[:-1]
        position = torch.arange(int(cpu[-1])) - torch.repeat_interleave(cpu[:-1], lengths)
        return Layout(
            cpu.to(device=device, dtype=torch.int32), cpu, position.to(device), int(lengths.max())
        )


class Kernels(Protocol):
    """KDA and attention over packed documents."""

    def kda(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """q, k (normalized, q unscaled), v [N, H, D], g [N, H, D] fp32 log decay, beta [N, H] fp32.

        Returns the outputs [N, H, D] and the final states [n_docs, H, V, K] fp32.
        """
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Causal attention inside each document; q, k, v [N, H, D], scale D^-0.5."""
        ...


class ReferenceKernels:
    """Plain torch, a loop over time."""

    def kda(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """The recurrence itself, documents padded side by side."""
        starts = layout.starts_cpu
        n_docs, heads, dim = len(starts) - 1, q.shape[1], q.shape[2]
        lengths = (starts[1:] - starts[:-1]).to(q.device)
        place = torch.arange(layout.longest, device=q.device)
        inside = place[None] < lengths[:, None]  # [n_docs, longest]
        index = (starts[:-1].to(q.device)[:, None] + place).clamp(max=q.shape[0] - 1)
        qp, kp, vp, gp = (x.float()[index] for x in (q, k, v, g))
        bp = beta.float()[index] * inside[..., None]
        gp = gp * inside[..., None, None]
        state = q.new_zeros(n_docs, heads, dim, dim, dtype=torch.float32)
        outs: list[Tensor] = []
        for t in range(layout.longest):
            state = state * gp[:, t].exp()[:, :, None, :]
            seen = torch.einsum("nhvk,nhk->nhv", state, kp[:, t])
            update = bp[:, t, :, None] * (vp[:, t] - seen)
            state = state + update[..., None] * kp[:, t, :, None, :]
            outs.append(torch.einsum("nhvk,nhk->nhv", state, qp[:, t]))
        out = torch.stack(outs, 1)[inside] * dim**-0.5
        return out.to(v.dtype), state

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Documents one by one."""
        bounds = layout.starts_cpu.tolist()
        outs = [
            F.scaled_dot_product_attention(
                *(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True
            )[0].transpose(0, 1)
            for a, b in pairwise(bounds)
        ]
        return torch.cat(outs)


class CudaKernels:
    """fla-core and flash attention."""

    def __init__(self) -> None:
        from fla.ops.kda import chunk_kda

        self._chunk_kda = chunk_kda
        pin_kernel_configs()

    def kda(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """fla-core `chunk_kda` with bounded gates."""
        out, state = self._chunk_kda(
            *(x[None] for x in (q, k, v, g, beta)),
            scale=q.shape[-1] ** -0.5,
            output_final_state=True,
            safe_gate=True,
            lower_bound=-5.0,
            state_v_first=True,
            cu_seqlens=layout.starts.long(),
            cu_seqlens_cpu=layout.starts_cpu,
        )
        return out[0], state

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """torch's variable-length flash attention."""
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, layout.starts, layout.starts, layout.longest, layout.longest, 0.0, True, False,
            scale=q.shape[-1] ** -0.5,
        )  # fmt: skip
        return out[0]


def pin_kernel_configs(n_warps: int = 4) -> None:
    """Give every imported fla kernel one fixed configuration, so that nothing is tuned by timing.

    Timing at start costs minutes and makes two runs differ; four warps were measured best for 32-wide heads.
    """
    import sys

    from triton.runtime.autotuner import Autotuner, Heuristics

    modules = [module for name, module in sys.modules.items() if name.startswith("fla.")]
    found = [x for module in modules for x in vars(module).values()]
    for tuner in found:
        while isinstance(tuner, Heuristics):
            tuner = tuner.fn
        if not isinstance(tuner, Autotuner):
            continue
        fits = [c for c in tuner.configs if c.num_warps == n_warps] or tuner.configs
        tuner.configs = [min(fits, key=lambda c: c.num_stages)]


def kernels_for(device: torch.device) -> Kernels:
    """The kernels of a device."""
    return CudaKernels() if device.type == "cuda" else ReferenceKernels()
