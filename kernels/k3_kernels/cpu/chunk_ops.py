"""Prefill chunks on CPUs by the native library: same signatures and rules as `k3_kernels.reference`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from k3_kernels.cpu.calls import DTYPES, pair
from k3_kernels.reference import group
from k3_kernels.reference.group import ChunkSpan, GroupCache, GroupRule


class NativeChunks:
    """`reference.group.chunks`, token by token: the result does not depend on how a prompt is cut.

    A model whose activations are not of the library's dtypes goes to the reference.
    """

    def __init__(self) -> None:
        """Raises LibraryError."""
        self._chunk = pair("k3_kda_chunk")

    def chunks(
        self,
        u_THSD: Tensor,
        raw_THD: Tensor,
        beta_TH: Tensor,
        rule: GroupRule,
        cache: GroupCache,
        spans: Sequence[ChunkSpan],
    ) -> Tensor:
        """o [T, H, D]; fills the windows and states written to."""
        if u_THSD.dtype not in DTYPES:
            return group.chunks(u_THSD, raw_THD, beta_TH, rule, cache, spans)
        _check(u_THSD, raw_THD, rule, cache)
        n_tokens, heads, _, dim = u_THSD.shape
        o = u_THSD.new_empty(n_tokens, heads, dim)
        bound = rule.lower_bound
        constants = (
            *(rule.conv_HSDw.data_ptr(), rule.bias_HD.data_ptr(), rule.decay_H.data_ptr()),
            *(0.0 if bound is None else bound, bound is not None, rule.eps),
        )
        for lo, hi, read, write in spans:
            known = read >= 0
            self._chunk[u_THSD.dtype](
                *(u_THSD[lo:].data_ptr(), u_THSD.stride(0), raw_THD[lo:].data_ptr()),
                *(raw_THD.stride(0), beta_TH[lo:].data_ptr(), beta_TH.stride(0), *constants),
                cache.windows[read].data_ptr() if known else None,
                cache.states[read * cache.columns].data_ptr() if known else None,
                cache.windows[write].data_ptr(),
                cache.states[write * cache.columns].data_ptr(),
                *(
                    o[lo:].data_ptr(),
                    cache.windows.stride(1),
                    cache.states.stride(1),
                    hi - lo,
                    heads,
                    dim,
                    rule.conv_HSDw.shape[-1],
                ),
            )
        return o


def _check(u_THSD: Tensor, raw_THD: Tensor, rule: GroupRule, cache: GroupCache) -> None:
    """What the library takes for granted: how tokens, constants and slots lie in memory. Our own mistakes."""
    dtype = u_THSD.dtype
    for name, x in (("inputs", u_THSD[0]), ("raw gate", raw_THD[0])):
        assert x.is_contiguous(), f"{name} of a token: strides {x.stride()}"
    for name, x in (
        ("convolution weights tap by tap", rule.conv_HSDw.transpose(-1, -2)),
        ("gate bias", rule.bias_HD),
        ("decay", rule.decay_H),
        ("a head's window", cache.windows[0, 0]),
        ("a head's state", cache.states[0, 0]),
    ):
        assert x.is_contiguous(), f"{name}: strides {x.stride()}, expected contiguous"
        assert x.dtype == dtype, f"{name}: {x.dtype}, expected the activations' {dtype}"
