"""The first of the best: values and ids as one number, so that a maximum of such numbers is the answer.

Equal values: the lowest id. A NaN is better than everything, as torch has it.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOTHING = tl.constexpr(-(2**63) + 1)  # below every value


@triton.jit
def ranked(value, index):
    """float32 values and int32 ids as int64: larger is better."""
    value = tl.where(value == 0.0, 0.0, value)  # both zeros are equal
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(value != value, 0x7FFFFFFF, key)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def index_of(best):
    """The id in a number of `ranked`, int64."""
    return 0x7FFFFFFF - (best & 0x7FFFFFFF)
