"""MXFP4 weights become the activations' dtype in registers: two shifts and two masks for two of them, and a product.

Weights are read as 32-bit words of 8 codes, inputs 8w to 8w + 7, the first in the lowest bits
(`k3_kernels.reference.mxfp4`). Scales are those of weights: 2^-63 to 2^64, stored as 64 to LARGEST_SCALE. In bfloat16
weight and power must stay in its range, so 2^63 of them is in the activations instead.
"""

import triton
import triton.language as tl

LARGEST_SCALE = 191


@triton.jit
def _power(scale, dtype: tl.constexpr):
    """2^(scale - 64) by its bits: 2^-63 of what a group's scale says."""
    if dtype == tl.bfloat16:
        power = ((scale.to(tl.int16) + 63) << 7).to(tl.bfloat16, bitcast=True)
    else:
        power = ((scale.to(tl.int32) + 63) << 23).to(tl.float32, bitcast=True)
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
def packed_step(
    acc, x, words, scale, ROWS: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr
):
    """acc plus 8 WORDS inputs. A word holds 8 of them, so every eighth input makes a product, and nothing is interleaved."""
    dtype: tl.constexpr = x.dtype
    power = _power(scale, dtype)
    power = tl.reshape(tl.broadcast_to(power[:, :, None], [ROWS, WORDS // 4, 4]), [ROWS, WORDS])
    if dtype == tl.bfloat16:
        x = x * 2.0**63
    even, odd = tl.split(tl.reshape(x, [TOKENS, 4 * WORDS, 2]))
    x02, x24 = tl.split(tl.reshape(even, [TOKENS, 2 * WORDS, 2]))
    x13, x35 = tl.split(tl.reshape(odd, [TOKENS, 2 * WORDS, 2]))
    x0, x4 = tl.split(tl.reshape(x02, [TOKENS, WORDS, 2]))
    x2, x6 = tl.split(tl.reshape(x24, [TOKENS, WORDS, 2]))
    x1, x5 = tl.split(tl.reshape(x13, [TOKENS, WORDS, 2]))
    x3, x7 = tl.split(tl.reshape(x35, [TOKENS, WORDS, 2]))
    low, high = _pair(words, power, dtype, 0)
    acc = tl.dot(low, tl.trans(x0), acc, input_precision="ieee")
    acc = tl.dot(high, tl.trans(x4), acc, input_precision="ieee")
    low, high = _pair(words, power, dtype, 1)
    acc = tl.dot(low, tl.trans(x1), acc, input_precision="ieee")
    acc = tl.dot(high, tl.trans(x5), acc, input_precision="ieee")
    low, high = _pair(words, power, dtype, 2)
    acc = tl.dot(low, tl.trans(x2), acc, input_precision="ieee")
    acc = tl.dot(high, tl.trans(x6), acc, input_precision="ieee")
    low, high = _pair(words, power, dtype, 3)
    acc = tl.dot(low, tl.trans(x3), acc, input_precision="ieee")
    return tl.dot(high, tl.trans(x7), acc, input_precision="ieee")
