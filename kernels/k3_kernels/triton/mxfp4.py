"""MXFP4 experts as the kernels read them, and their product with tokens.

At load the codes of a row are dealt to 32-bit words so that a word's eight codes are inputs of one block of 128 that lie 16
apart: unpacking code after code gives tiles of 16 inputs that follow each other, as activations do, and nothing is
rearranged in registers. Of word w in a block, code c < 4 is input 32 c + w and code c + 4 is input 32 c + 16 + w: both have
the same scale, and a 32-bit word holds the four scales of a block.

A code becomes the activations' dtype by shifts, masks and a product with its power of two. Scales are those of weights:
2^-63 to 2^64, stored as 64 to LARGEST_SCALE. In bfloat16 weight and power must stay in its range, so 2^63 of them comes
at the end of the sum.

Letters: E experts, R rows, K inputs, L inputs filled up to whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from k3_kernels.reference.moe import PackedExperts
from k3_kernels.reference.mxfp4 import unpack

LARGEST_SCALE = 191
BLOCK, GROUP = 128, 32  # inputs that share words; that share a scale
ONE = 127  # the scale 2^0


@dataclass(frozen=True, slots=True)
class DealtMatrix:
    """words [E, R, L / 8] and scales [E, R, L / 128], int32; `width` is K."""

    words: Tensor
    scales: Tensor
    width: int

    @classmethod
    def of(cls, packed_ERk: Tensor, scale_ERg: Tensor) -> DealtMatrix:
        """From two codes a byte, the first in the low bits, and a scale for 32 inputs. Expert by expert: codes take room."""
        width = 2 * packed_ERk.shape[-1]
        missing = -width % BLOCK
        scales = pad(scale_ERg, (0, missing // GROUP), value=ONE).contiguous().view(torch.int32)
        words = scales.new_empty(*packed_ERk.shape[:2], (width + missing) // 8)
        for packed_Rk, dealt in zip(packed_ERk, words, strict=True):
            codes = torch.stack((packed_Rk & 15, packed_Rk >> 4), -1).flatten(1)
            blocks = pad(codes, (0, missing)).view(len(codes), -1, 4, 2, 16)  # .. c, half, w
            code_c = blocks.permute(0, 1, 4, 3, 2).flatten(3)  # .. w, code
            two = code_c[..., ::2] | (code_c[..., 1::2] << 4)
            dealt.copy_(two.contiguous().view(torch.int32).flatten(1))
        return cls(words, scales, width)

    def unpacked(self, expert: int, dtype: torch.dtype) -> Tensor:
        """One expert's weights [R, K]."""
        two = self.words[expert].view(torch.uint8).unflatten(1, (-1, 16, 4))
        code = torch.stack((two & 15, two >> 4), -1).flatten(3)  # .. w, code
        codes = code.unflatten(3, (2, 4)).permute(0, 1, 4, 3, 2).flatten(1)[:, : self.width]
        packed = codes[:, ::2] | (codes[:, 1::2] << 4)
        scale = self.scales[expert].view(torch.uint8)[:, : self.width // GROUP]
        return unpack(packed, scale, dtype)


@dataclass(frozen=True, slots=True)
class DealtExperts:
    """`reference.moe.PackedExperts` for these kernels."""

    first: int
    inner: DealtMatrix
    outer: DealtMatrix
    dtype: torch.dtype

    @classmethod
    def of(cls, experts: PackedExperts) -> DealtExperts:
        """At load; a copy."""
        inner = DealtMatrix.of(experts.w13_packed, experts.w13_scale)
        outer = DealtMatrix.of(experts.w2_packed, experts.w2_scale)
        return cls(experts.first, inner, outer, experts.dtype)

    @property
    def count(self) -> int:
        """Experts held here."""
        return len(self.inner.words)

    def w13(self, expert: int) -> Tensor:
        """Unpacked now."""
        return self.inner.unpacked(expert, self.dtype)

    def w2(self, expert: int) -> Tensor:
        """Unpacked now."""
        return self.outer.unpacked(expert, self.dtype)


@triton.jit
def _power(scale, dtype: tl.constexpr):
    """2^(scale - 64) by its bits: 2^-63 of what a group's scale says."""
    if dtype == tl.bfloat16:
        power = ((scale.to(tl.int16) + 63) << 7).to(tl.bfloat16, bitcast=True)
    else:
        power = ((scale + 63) << 23).to(tl.float32, bitcast=True)
    return power


@triton.jit
def _pair(words, power, dtype: tl.constexpr, PLACE: tl.constexpr):
    """Codes PLACE and PLACE + 4 of 8 in a word, as weights; bfloat16 ones are 2^-63 of them.

    Sign and magnitude of a code, put where bfloat16 has its sign and its last bits of exponent and first of fraction,
    are 2^-126 of its value; both halves of a word at once.
    """
    code = words << (12 - 4 * PLACE)
    bits = (code & -2147450880) | ((code >> 6) & 0x01C001C0)  # 0x80008000 and the magnitudes
    if dtype == tl.bfloat16:
        low = bits.to(tl.int16).to(dtype, bitcast=True) * power
        high = (bits >> 16).to(tl.int16).to(dtype, bitcast=True) * power
    else:
        low = (bits << 16).to(tl.float32, bitcast=True) * 2.0**63 * power
        high = (bits & -65536).to(tl.float32, bitcast=True) * 2.0**63 * power
    return low.to(dtype), high.to(dtype)


@triton.jit
def packed_product(
    x_row,
    here,
    words_row,
    scales_row,
    inside,
    width,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Weight rows times tokens: [ROWS, TOKENS] float32. Rows are pointers; `width` inputs. EVEN: tiles are whole."""
    dtype: tl.constexpr = x_row.dtype.element_ty
    acc = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
    place = tl.arange(0, 16)
    for start in tl.range(0, width, 128, num_stages=STAGES):
        word = start // 8 + place
        if EVEN:
            words = tl.load(words_row[:, None] + word[None, :])
            scales = tl.load(scales_row + start // 128)
        else:
            words = tl.load(words_row[:, None] + word[None, :], mask=inside[:, None], other=0)
            scales = tl.load(scales_row + start // 128, mask=inside, other=0)
        for c in tl.static_range(4):
            power = _power((scales >> (8 * c)) & 255, dtype)
            low, high = _pair(words, power[:, None], dtype, c)
            k = start + 32 * c + place
            if EVEN:
                x = tl.load(x_row[:, None] + k[None, :], mask=here[:, None], other=0.0)
                acc = tl.dot(low, tl.trans(x), acc, input_precision="ieee")
                x = tl.load(x_row[:, None] + (k + 16)[None, :], mask=here[:, None], other=0.0)
                acc = tl.dot(high, tl.trans(x), acc, input_precision="ieee")
            else:
                known = here[:, None] & (k < width)[None, :]
                x = tl.load(x_row[:, None] + k[None, :], mask=known, other=0.0)
                acc = tl.dot(low, tl.trans(x), acc, input_precision="ieee")
                x = tl.load(x_row[:, None] + (k + 16)[None, :], mask=known, other=0.0)
                acc = tl.dot(high, tl.trans(x), acc, input_precision="ieee")
    if dtype == tl.bfloat16:
        acc = acc * 2.0**63
    return acc
