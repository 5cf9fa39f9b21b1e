"""Holds the GPU kernels against the references on random packed documents: `python -m training.check_device`."""

import time

import torch
from torch import Tensor

from training.kernels import CudaKernels, Layout, ReferenceKernels


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def main() -> None:
    """Print relative errors of outputs, states and gradients; fail above 2 %."""
    torch.manual_seed(3)
    device = torch.device("cuda")
    starts = torch.tensor([0, 63, 64, 190, 333, 512])
    layout = Layout.of(starts, device)
    n, heads, dim = int(starts[-1]), 8, 32
    q, k, v = (torch.randn(n, heads, dim, device=device) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g = -5 * torch.sigmoid(torch.randn(n, heads, dim, device=device) * 2 - 3)
    beta = torch.sigmoid(torch.randn(n, heads, device=device))
    results: list[list[Tensor]] = []
    for kernels, dtype in ((ReferenceKernels(), torch.float32), (CudaKernels(), torch.bfloat16)):
        began = time.monotonic()
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)] + [
            x.clone().requires_grad_() for x in (g, beta)
        ]
        out, state = kernels.kda(*inputs, layout)
        out.float().square().sum().backward()
        qa, ka, va = (
            torch.randn(
                n, heads, 48, device=device, generator=torch.Generator(device).manual_seed(i)
            )
            for i in range(3)
        )
        heads_in = [
            x.to(dtype if dtype == torch.bfloat16 else torch.float32).requires_grad_()
            for x in (qa, ka, va)
        ]
        mixed = kernels.attention(*heads_in, layout)
        mixed.float().square().sum().backward()
        results.append([out, state, *(x.grad for x in inputs), mixed, *(x.grad for x in heads_in)])
        torch.cuda.synchronize()  # noqa: TID251
        print(f"{type(kernels).__name__}: {time.monotonic() - began:.1f} s")
    names = ["kda", "state", "dq", "dk", "dv", "dg", "dbeta", "attention", "aq", "ak", "av"]
    errors = {name: _relative(b, a) for name, a, b in zip(names, *results, strict=True)}
    print({name: f"{error:.1e}" for name, error in errors.items()})
    bad = {name: error for name, error in errors.items() if not error < 2e-2}
    if bad:
        raise SystemExit(f"GPU kernels disagree with the references: {bad}")


if __name__ == "__main__":
    main()
