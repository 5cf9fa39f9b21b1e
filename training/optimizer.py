"""Muon for the matrices inside layers, AdamW for the rest; fp32 masters behind bf16 leaves.

Matrices of one shape share one master tensor [G, m, n]; the leaves the forward reads are views of one bf16
copy, refreshed after each step. Stacked experts count as separate matrices.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def orthogonalize(x: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix, batched, bf16 on GPU; x [G, m, n]."""
    y = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    tall = y.shape[-2] > y.shape[-1]
    if tall:
        y = y.mT
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return (y.mT if tall else y).to(x.dtype)


class _Group:
    """All matrices of one shape."""

    def __init__(self, names: list[str], values: list[Tensor], leaf_dtype: torch.dtype) -> None:
        flat = [v.reshape(-1, *v.shape[-2:]) for v in values]
        self.master = torch.cat(flat).float()
        self.momentum = torch.zeros_like(self.master)
        self.copy = self.master.to(leaf_dtype, copy=True)
        self.leaves: dict[str, Tensor] = {}
        at = 0
        for name, value, part in zip(names, values, flat, strict=True):
            view = self.copy[at : at + len(part)].view(value.shape)
            self.leaves[name] = view.detach().requires_grad_()
            at += len(part)

    @torch.no_grad()
    def step(self, lr: float, momentum: float, decay: float) -> None:
        shape = self.master.shape
        grads = [
            leaf.grad.reshape(-1, *shape[1:])
            for leaf in self.leaves.values()
            if leaf.grad is not None
        ]
        gradient = torch.cat(grads).float()
        self.momentum.mul_(momentum).add_(gradient)
        update = orthogonalize(gradient + momentum * self.momentum)
        scale = 0.2 * max(shape[1:]) ** 0.5
        self.master.mul_(1 - lr * decay).add_(update, alpha=-lr * scale)
        self.copy.copy_(self.master)
        for leaf in self.leaves.values():
            leaf.grad = None


class Optimizer:
    """Owns every parameter. `leaves` is what the forward reads.

    values: fp32 tensors on the training device. is_muon(name) chooses the rule; slow(name) halves AdamW's rate.
    Names in `frozen` get no gradient (the routing bias).
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        is_muon: Callable[[str], bool],
        slow: Callable[[str], bool],
        frozen: Callable[[str], bool],
        leaf_dtype: torch.dtype,
        lr_muon: float,
        lr_adam: float,
        decay: float = 0.05,
        momentum: float = 0.95,
    ) -> None:
        self.lr_muon, self.lr_adam = lr_muon, lr_adam
        self.decay, self.momentum = decay, momentum
        shapes: dict[tuple[int, ...], list[str]] = {}
        self.leaves: dict[str, Tensor] = {}
        fast_group: list[Tensor] = []
        slow_group: list[Tensor] = []
        for name, value in values.items():
            if is_muon(name):
                shapes.setdefault(tuple(value.shape[-2:]), []).append(name)
            elif frozen(name):
                self.leaves[name] = value.clone()
            else:
                leaf = value.clone().requires_grad_()
                self.leaves[name] = leaf
                (slow_group if slow(name) else fast_group).append(leaf)
        self.groups = [
            _Group(names, [values[n] for n in names], leaf_dtype) for names in shapes.values()
        ]
        for group in self.groups:
            self.leaves |= group.leaves
        self._adam_leaves = fast_group + slow_group
        groups = [{"params": fast_group, "factor": 1.0}, {"params": slow_group, "factor": 0.5}]
        self.adam = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=lr_adam, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, factor: float) -> Tensor:
        """One update at `factor` times the base rates; returns AdamW's gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._adam_leaves, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.lr_adam * group["factor"] * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for group in self.groups:
            group.step(self.lr_muon * factor, self.momentum, self.decay)
        return norm

    def masters(self) -> dict[str, Tensor]:
        """fp32 values by name."""
        out = {name: leaf.detach() for name, leaf in self.leaves.items()}
        for group in self.groups:
            at = 0
            for name, leaf in group.leaves.items():
                n = leaf.numel() // group.master[0].numel()
                out[name] = group.master[at : at + n].view(leaf.shape)
                at += n
        return out

    def state(self) -> dict[str, Tensor]:
        """Everything needed to resume, as tensors by name."""
        out = {f"value.{name}": value for name, value in self.masters().items()}
        for i, group in enumerate(self.groups):
            out[f"muon.{i}"] = group.momentum
        for i, leaf in enumerate(self._adam_leaves):
            for key, value in self.adam.state[leaf].items():
                out[f"adam.{i}.{key}"] = value
        return out

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of `state`."""
        for name, value in self.masters().items():
            value.copy_(state[f"value.{name}"])
        for i, group in enumerate(self.groups):
            group.momentum.copy_(state[f"muon.{i}"])
            group.copy.copy_(group.master)
        for i, leaf in enumerate(self._adam_leaves):
            keys = [k for k in state if k.startswith(f"adam.{i}.")]
            self.adam.state[leaf] = {
                k.split(".", 2)[2]: state[k].clone()
                if k.endswith("step")
                else state[k].to(leaf.device)
                for k in keys
            }
