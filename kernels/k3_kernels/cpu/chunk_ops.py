"""Prefill chunks on CPUs by the native library: same signatures and rules as `k3_kernels.reference`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3_kernels.cpu.calls import DTYPES, pair
from k3_kernels.reference import group, mla
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


class NativePrefill:
    """`reference.mla.prefill`: torch expands keys and values, the library attends in one pass over them."""

    def __init__(self) -> None:
        """Raises LibraryError."""
        self._attend = pair("k3_attend_chunk")

    def prefill(
        self,
        q_THD: Tensor,
        cache_PTK: Tensor,
        page_table_RW: Tensor,
        cu_lens: tuple[int, ...],
        starts: tuple[int, ...],
        kv_up_HDC: Tensor,
        scale: float,
    ) -> Tensor:
        """o [T, H, V]."""
        if q_THD.dtype not in DTYPES or cache_PTK.dtype != q_THD.dtype:
            arguments = (q_THD, cache_PTK, page_table_RW, cu_lens, starts, kv_up_HDC, scale)
            return mla.prefill(*arguments)
        if q_THD.stride()[1:] != (q_THD.shape[2], 1):
            q_THD = q_THD.contiguous()
        heads, _, rank = kv_up_HDC.shape
        page_tokens, shared = cache_PTK.shape[1], cache_PTK.shape[2] - rank
        nope = q_THD.shape[2] - shared
        key_up, value_up = (x.flatten(0, 1) for x in (kv_up_HDC[:, :nope], kv_up_HDC[:, nope:]))
        out = q_THD.new_empty(q_THD.shape[0], heads, kv_up_HDC.shape[1] - nope)
        for r, start in enumerate(starts):
            lo, hi = cu_lens[r], cu_lens[r + 1]
            n_keys = start + hi - lo
            pages = page_table_RW[r, : -(-n_keys // page_tokens)].to(torch.int64)
            latent = cache_PTK.index_select(0, pages).view(-1, rank + shared)[:n_keys]
            key = key_up @ latent[:, :rank].t()  # [H * N, S]
            value = latent[:, :rank] @ value_up.t()  # [S, H * V]
            extra = latent[:, rank:].t().contiguous()
            self._attend[q_THD.dtype](
                *(q_THD[lo:].data_ptr(), q_THD.stride(0), key.data_ptr(), extra.data_ptr()),
                *(value.data_ptr(), out[lo:].data_ptr(), start, hi - lo, heads, nope, shared),
                *(out.shape[2], scale),
            )
        return out
