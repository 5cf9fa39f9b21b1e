"""KDA for the model on GPUs. Of a prefill chunk the delta rule is our kernel; convolution and gate are torch's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from k3_kernels.api import BackendError
from k3_kernels.reference.group import ChunkSpan, GroupCache, GroupRule, chunks
from k3_kernels.triton import kda_chunk, kda_decode, kda_verify

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_GROUP = 16


class TritonKda:
    """`KdaOps`. A group of one token without records is decoded in place; others keep records (replay)."""

    def __init__(self, *, hopper: bool = False) -> None:
        """hopper: on a GPU of compute capability 9."""
        self.hopper = hopper

    def chunks(
        self,
        u_THSD: Tensor,
        raw_THD: Tensor,
        beta_TH: Tensor,
        rule: GroupRule,
        cache: GroupCache,
        spans: Sequence[ChunkSpan],
    ) -> Tensor:
        """`reference.group.chunks`, o in float32."""
        delta = partial(kda_chunk.delta, lower_bound=rule.lower_bound)
        return chunks(u_THSD, raw_THD, beta_TH, rule, cache, spans, delta)

    def require(self, head_dim: int, conv_width: int, dtype: torch.dtype) -> None:
        """Heads of 16, 32, 64 .. channels, a convolution of at least two taps, no float64."""
        if head_dim < 16 or head_dim & (head_dim - 1) or conv_width < 2 or dtype not in DTYPES:
            raise BackendError(
                f"backends.kda=triton: head dim {head_dim}, convolution width {conv_width}, {dtype}: expected a power "
                f"of two from 16, a width from 2 and one of {', '.join(map(str, DTYPES))}; set backends.kda=reference"
            )

    def group(
        self,
        u_BGHSD: Tensor,
        raw_BGHD: Tensor,
        beta_BGH: Tensor,
        rule: GroupRule,
        cache: GroupCache,
        slots_B: Tensor,
        read_column_B: Tensor,
    ) -> Tensor:
        """`reference.group.verify`. o in float32. Raises BackendError for snapshots of a group."""
        n_rows, group, heads, _, dim = u_BGHSD.shape
        _check(u_BGHSD, raw_BGHD, beta_BGH, rule, cache)
        o = torch.empty(n_rows, group, heads, dim, dtype=torch.float32, device=u_BGHSD.device)
        if cache.records is not None:
            arguments = (u_BGHSD, raw_BGHD, beta_BGH, rule, cache, slots_B)
            kda_verify.verify(*arguments, read_column_B, o, hopper=self.hopper)
            return o
        if group > 1 or cache.columns > 1:
            raise BackendError(
                f"backends.kda=triton with {cache.columns} states per slot and groups of {group}: it keeps records, "
                "not a state per token; set spec.kda_rollback=replay or backends.kda=reference"
            )
        first = (u_BGHSD[:, 0], raw_BGHD[:, 0], beta_BGH[:, 0])
        kda_decode.decode(*first, rule, cache, slots_B, o[:, 0], hopper=self.hopper)
        return o


def _check(
    u_BGHSD: Tensor, raw_BGHD: Tensor, beta_BGH: Tensor, rule: GroupRule, cache: GroupCache
) -> None:
    """What the kernels take for granted: how a head lies in memory. Our own mistakes, not a user's."""
    dim = u_BGHSD.shape[-1]
    group = u_BGHSD.shape[1]
    taps = rule.conv_HSDw.transpose(-1, -2)
    width = taps.shape[-2]
    assert group <= LARGEST_GROUP, f"group of {group}: at most {LARGEST_GROUP}"
    assert u_BGHSD.stride()[-2:] == (dim, 1), f"inputs of a head: strides {u_BGHSD.stride()}"
    assert raw_BGHD.stride()[-2:] == (dim, 1), f"raw gate: strides {raw_BGHD.stride()}"
    assert beta_BGH.stride(-1) == 1, f"raw beta: strides {beta_BGH.stride()}"
    assert taps.is_contiguous(), "convolution weights must be stored tap by tap"
    assert rule.bias_HD.is_contiguous(), f"gate bias: strides {rule.bias_HD.stride()}"
    assert cache.states.stride()[-2:] == (dim, 1), f"states: strides {cache.states.stride()}"
    kept = width - 1
    assert cache.windows.stride()[-3:] == (dim * kept, kept, 1), (
        f"windows: strides {cache.windows.stride()}"
    )
    assert cache.tails.is_contiguous(), f"tails: strides {cache.tails.stride()}"
    room = cache.tails.shape[-2] + 1
    if cache.records is not None:
        assert cache.records.is_contiguous(), f"records: strides {cache.records.stride()}"
        room = min(room, cache.records.shape[3])
    assert room >= group, f"room for {room} tokens of a group of {group}"
