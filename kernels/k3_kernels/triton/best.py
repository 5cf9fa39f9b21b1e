"""The first of the best: values and ids as one number, so that a maximum of such numbers is the answer.

Equal values: the lowest id. A NaN is better than everything, as torch has it.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOTHING = tl.constexpr(-(2**63) + 1)  # below every value


@triton.jit
def ordered(value):
    """float32 values as int32 of the same order, both zeros equal, a NaN above all."""
    value = tl.where(value == 0.0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    number = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, number)


@triton.jit
def value_of(number):
    """The float32 value of a number of `ordered`."""
    return tl.where(number < 0, number ^ 0x7FFFFFFF, number).to(tl.float32, bitcast=True)


@triton.jit
def ranked(value, index):
    """float32 values and int32 ids as int64: larger is better."""
    return (ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def index_of(best):
    """The id in a number of `ranked`, int64."""
    return 0x7FFFFFFF - (best & 0x7FFFFFFF)
