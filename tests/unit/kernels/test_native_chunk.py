"""Prefill chunks of the native CPU library are those of the torch reference, however a prompt is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from k3_kernels.api import ReferenceKda
from k3_kernels.cpu import library
from k3_kernels.cpu.chunk_ops import NativeChunks, NativePrefill
from k3_kernels.reference import mla
from k3_kernels.reference.group import ChunkSpan, GroupCache, GroupRule
from k3_kernels.reference.precision import wide
from torch import Tensor

from tests.compare import assert_close

pytestmark = pytest.mark.skipif(not library.is_built(), reason="no native CPU library was built")
F32, F64 = torch.float32, torch.float64
NAN = float("nan")


class Layer:
    """One layer's inputs, constants and a pool of slots in which only slot 2 was ever written."""

    def __init__(
        self,
        n_tokens: int,
        heads: int,
        dim: int,
        conv: int,
        *,
        bound: float | None = -5.0,
        columns: int = 1,
        dtype: torch.dtype = F64,
    ) -> None:
        generator = torch.Generator().manual_seed(dim + conv)

        def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)

        acc = wide(dtype)

        self.rule = GroupRule(
            conv_HSDw=draw(heads, 3, conv, dim, dtype=acc).transpose(-1, -2),
            bias_HD=draw(heads, dim, dtype=acc),
            decay_H=draw(heads, dtype=acc).exp(),
            lower_bound=bound,
            eps=1e-6,
        )
        kept = conv - 1
        # strided as in the pools: a slot's head holds more than one of them
        states = torch.full((4 * columns, heads, dim + 1, dim), NAN, dtype=acc)[:, :, :dim]
        windows = torch.full((4, heads, 4, dim, kept), NAN, dtype=dtype)[:, :, :3]
        states[2 * columns], windows[2] = draw(heads, dim, dim), draw(heads, 3, dim, kept)
        self.cache = GroupCache(states, windows, torch.empty(4, heads, 3, 0, dim), columns, None)
        entry = draw(
            n_tokens, heads * (3 * dim + 1) + 5
        )  # inputs and beta are pieces of wider rows
        self.u = entry[:, : heads * 3 * dim].unflatten(1, (heads, 3, dim))
        self.beta = entry[:, -heads:]
        self.raw = draw(n_tokens, heads, dim) * 3

    def run(self, ops: ReferenceKda | NativeChunks, spans: list[ChunkSpan]) -> list[Tensor]:
        """o, states and windows afterwards."""
        cache = replace(
            self.cache, states=self.cache.states.clone(), windows=self.cache.windows.clone()
        )
        o = ops.chunks(self.u, self.raw, self.beta, self.rule, cache, spans)
        return [o, cache.states, cache.windows]


@pytest.mark.parametrize(
    ("n_tokens", "heads", "dim", "conv"),
    [(70, 2, 32, 4), (19, 3, 5, 4), (33, 1, 24, 2), (40, 2, 72, 3), (1, 2, 8, 4)],
)
@pytest.mark.parametrize(("dtype", "atol"), [(F64, 1e-12), (F32, 3e-5)], ids=["f64", "f32"])
def test_chunks_equal_the_reference_at_odd_sizes(
    n_tokens: int, heads: int, dim: int, conv: int, dtype: torch.dtype, atol: float
) -> None:
    layer = Layer(n_tokens, heads, dim, conv, columns=2, dtype=dtype)
    cut = n_tokens // 3
    spans = [ChunkSpan(0, cut, -1, 1), ChunkSpan(cut, n_tokens, 2, 0)]
    spans = [span for span in spans if span.hi > span.lo]
    got = layer.run(NativeChunks(), spans)
    for name, x, expected in zip("osw", got, layer.run(ReferenceKda(), spans), strict=True):
        assert_close(x, expected, atol, name)


@pytest.mark.parametrize("bound", [None, -0.1, -40.0])
def test_every_gate_rule_equals_the_reference(bound: float | None) -> None:
    layer = Layer(37, 2, 16, 4, bound=bound)
    layer.raw[3:9] *= 40  # saturated gates, softplus beyond its linear threshold
    spans = [ChunkSpan(0, 37, 2, 2)]
    for x, expected in zip(
        layer.run(NativeChunks(), spans), layer.run(ReferenceKda(), spans), strict=True
    ):
        assert_close(x, expected, 1e-12)


@pytest.mark.parametrize("dtype", [F64, F32], ids=["f64", "f32"])
def test_a_prompt_in_pieces_gives_the_same_bits_as_in_one(dtype: torch.dtype) -> None:
    layer = Layer(67, 2, 24, 4, dtype=dtype)
    whole = layer.run(NativeChunks(), [ChunkSpan(0, 67, -1, 3)])
    pieces = [ChunkSpan(0, 1, -1, 3), ChunkSpan(1, 3, 3, 1), ChunkSpan(3, 20, 1, 3)]
    got = layer.run(NativeChunks(), [*pieces, ChunkSpan(20, 67, 3, 3)])
    assert torch.equal(got[0], whole[0])
    assert torch.equal(got[1][3], whole[1][3])
    assert torch.equal(got[2][3], whole[2][3])


def test_a_bfloat16_model_is_computed_by_the_reference() -> None:
    layer = Layer(5, 1, 8, 4, dtype=torch.bfloat16)
    spans = [ChunkSpan(0, 5, -1, 0)]
    assert torch.equal(layer.run(NativeChunks(), spans)[0], layer.run(ReferenceKda(), spans)[0])


def _attention(
    lens: list[int], starts: list[int], widths: tuple[int, int, int, int], dtype: torch.dtype
):
    """Chunks of several requests over pages of 7 tokens, NaN where nothing was written."""
    nope, shared, rank, value = widths
    generator = torch.Generator().manual_seed(sum(lens))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)

    ends = [start + n for start, n in zip(starts, lens, strict=True)]
    width = max(-(-end // 7) for end in ends)
    pages = torch.randperm(len(lens) * width, generator=generator).to(torch.int32)
    table = pages.view(len(lens), width)
    cache = torch.full((len(lens) * width, 7, rank + shared + 3), NAN, dtype=dtype)
    cache = cache[..., : rank + shared]
    for row, end in zip(table, ends, strict=True):
        at = torch.arange(end)
        cache[row[at // 7].long(), at % 7] = draw(end, rank + shared)
    cu_lens = (0, *torch.tensor(lens).cumsum(0).tolist())
    q, up = draw(sum(lens), 3, nope + shared), draw(3, nope + value, rank)
    return q, cache, table, cu_lens, tuple(starts), up, 0.2


@pytest.mark.parametrize(
    ("lens", "starts", "widths"),
    [
        ([1], [0], (4, 2, 6, 3)),
        ([13, 1, 30], [5, 600, 0], (5, 3, 8, 9)),
        ([300, 25], [0, 250], (32, 16, 24, 40)),
        ([40], [512], (8, 8, 16, 72)),
    ],
)
@pytest.mark.parametrize(("dtype", "atol"), [(F64, 1e-12), (F32, 2e-5)], ids=["f64", "f32"])
def test_attention_of_chunks_equals_the_reference_at_odd_sizes(
    lens: list[int],
    starts: list[int],
    widths: tuple[int, int, int, int],
    dtype: torch.dtype,
    atol: float,
) -> None:
    arguments = _attention(lens, starts, widths, dtype)
    o = NativePrefill().prefill(*arguments)
    assert_close(o, mla.prefill(*arguments), atol, "o")


def test_attention_weighs_keys_far_below_the_peak_of_later_blocks_with_zero() -> None:
    q, cache, *rest = _attention([260], [300], (8, 8, 16, 5), F64)
    arguments = (q * 200, cache, *rest)
    o = NativePrefill().prefill(*arguments)
    assert_close(o, mla.prefill(*arguments), 1e-9, "o")
