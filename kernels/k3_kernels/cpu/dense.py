"""Projections, norms and activations on CPUs; rules of `k3_kernels.reference.norm`.

A projection keeps its weight packed (`src/gemm.h`), and where torch's product of many tokens is the faster one (without
AVX2, or with threads, which the library does not use) also as it came. Packed float32 weights that are exact in bfloat16, as those of released checkpoints are,
take half the bytes: a step's time is that of reading the weights. A packed product of a token is the same in any company.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from k3_kernels.cpu import library
from k3_kernels.cpu.calls import DTYPES, as_rows, pair, rows
from k3_kernels.reference import norm

LANES = {torch.float32: 16, torch.float64: 8}
FEW_TOKENS, ALWAYS = 64, 1 << 62


def most_tokens() -> int:
    """Up to so many the packed product is the faster one, with the threads this process has now."""
    is_fastest = library.variant() != "portable" and torch.get_num_threads() == 1
    return ALWAYS if is_fastest else FEW_TOKENS


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix, or several of one shape along the first axes, as `src/gemm.h` reads it."""

    data: Tensor
    outputs: int
    inputs: int
    is_narrow: bool

    @classmethod
    def of(cls, weight: Tensor) -> Packed:
        """weight: [.., O, I], float32 or float64."""
        lanes = LANES[weight.dtype]
        n_outputs, n_inputs = weight.shape[-2:]
        is_narrow = weight.dtype == torch.float32 and is_exact(weight, torch.bfloat16)
        width = 2 if is_narrow else 1
        w = pad(weight, (0, -n_inputs % width, 0, -n_outputs % lanes))
        w = w.to(torch.bfloat16) if is_narrow else w
        w = w.unflatten(-1, (-1, width)).unflatten(-3, (-1, lanes))  # [.., panel, lane, input, 2]
        return cls(w.transpose(-3, -2).contiguous(), n_outputs, n_inputs, is_narrow)


def is_exact(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether every value survives `dtype`."""
    return bool((x.to(dtype).to(x.dtype) == x).all())


class NativeProjection:
    """x [.., I] -> x weight^T [.., O]."""

    __slots__ = (
        *("_address", "_dtype", "_inputs", "_linear", "_most_tokens", "_narrow", "_outputs"),
        *("_weight", "packed"),
    )

    def __init__(self, weight_OI: Tensor) -> None:
        """Raises LibraryError."""
        self._most_tokens = most_tokens()
        self._weight = weight_OI if self._most_tokens < ALWAYS else None
        self._dtype = weight_OI.dtype
        self._outputs, self._inputs = weight_OI.shape
        self.packed = Packed.of(weight_OI)
        self._address, self._narrow = self.packed.data.data_ptr(), int(self.packed.is_narrow)
        self._linear = pair("k3_linear")[weight_OI.dtype]

    def __call__(self, x: Tensor) -> Tensor:
        """In the weight's dtype. Raises RuntimeError, as torch does, for an x of another dtype or width."""
        if x.dtype != self._dtype or x.shape[-1] != self._inputs:
            own = f"{self._dtype} [{self._outputs}, {self._inputs}]"
            raise RuntimeError(f"inputs {x.dtype} {list(x.shape)} for a weight {own}")
        n_tokens = x.numel() // self._inputs
        if self._weight is not None and n_tokens > self._most_tokens:
            return linear(x, self._weight)
        y = x.new_empty(*x.shape[:-1], self._outputs)
        x, stride = as_rows(x)
        self._linear(
            *(x.data_ptr(), stride, self._address, self._narrow, y.data_ptr()),
            *(n_tokens, self._outputs, self._inputs),
        )
        return y


class NativeDense:
    """`api.DenseOps`; other dtypes than float32 and float64 go to the reference."""

    def __init__(self) -> None:
        """Raises LibraryError."""
        self._rms, self._gated = pair("k3_rms_norm"), pair("k3_gated_rms_norm")
        self._gate, self._situ = pair("k3_gate"), pair("k3_situ")

    def projection(self, weight_OI: Tensor):
        """Packed at load."""
        if weight_OI.dtype in DTYPES:
            return NativeProjection(weight_OI)
        return lambda x: linear(x, weight_OI)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`reference.norm.rms_norm`."""
        if x.dtype not in DTYPES or weight.dtype != x.dtype:
            return norm.rms_norm(x, weight, eps)
        y = x.new_empty(x.shape)
        x, stride = as_rows(x)
        width = x.shape[-1]
        self._rms[x.dtype](
            *(x.data_ptr(), stride, weight.data_ptr(), y.data_ptr()),
            *(x.numel() // width, width, eps),
        )
        return y

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`reference.norm.gated_rms_norm` of [T, H, D]; rows of the gate may lie apart."""
        if (
            x.dtype not in DTYPES
            or gate.dtype != x.dtype
            or x.dim() != 3
            or gate.stride(1) != gate.shape[2]
        ):
            return norm.gated_rms_norm(x, gate, weight, eps)
        x, gate = x.contiguous(), rows(gate)
        y = torch.empty_like(x)
        self._gated[x.dtype](
            *(x.data_ptr(), gate.data_ptr(), gate.stride(0), weight.data_ptr(), y.data_ptr()),
            *(*x.shape, eps),
        )
        return y

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x sigmoid(gate), [T, D]."""
        if x.dtype not in DTYPES:
            return x * torch.sigmoid(gate)
        x, gate = x.contiguous(), rows(gate)
        y = torch.empty_like(x)
        self._gate[x.dtype](
            *(x.data_ptr(), gate.data_ptr(), gate.stride(0), y.data_ptr(), *x.shape)
        )
        return y

    def situ(self, gate_up_TF: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        """`reference.norm.situ` of a joint projection."""
        if gate_up_TF.dtype not in DTYPES:
            gate, up = gate_up_TF.chunk(2, -1)
            return norm.situ(gate, up, beta, linear_beta)
        x = rows(gate_up_TF)
        n, width = x.shape[0], x.shape[1] // 2
        y = x.new_empty(n, width)
        self._situ[x.dtype](
            *(x.data_ptr(), x.stride(0), y.data_ptr(), n, width, beta, linear_beta or 0.0)
        )
        return y
