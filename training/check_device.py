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
    queries = [torch.randn(n, heads, 48, device=device) for _ in range(3)]
    for kernels, dtype in ((ReferenceKernels(), torch.float32), (CudaKernels(), torch.bfloat16)):
        began = time.monotonic()
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        inputs += [x.clone().requires_grad_() for x in (g, beta)]
        out, state = kernels.kda(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], layout)
        out.float().square().sum().backward()
        attended = [x.to(dtype, copy=True).requires_grad_() for x in queries]
        mixed = kernels.attention(attended[0], attended[1], attended[2], layout)
        mixed.float().square().sum().backward()
        grads = [x.grad for x in inputs], [x.grad for x in attended]
        results.append(
            [x.detach() for x in (out, state, *grads[0], mixed, *grads[1]) if x is not None]
        )
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
