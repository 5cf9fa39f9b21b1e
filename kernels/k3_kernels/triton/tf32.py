"""Products in float32 precision on matrix units that know tf32. Device functions only."""

import triton
import triton.language as tl


@triton.jit
def product(a, b):
    """a @ b in float32 precision from three tf32 products. (The compiler's own tf32x3 also looks for NaN and infinity
    in every element, which costs more than the products.)
    """
    a_large = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    b_large = (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    c = tl.dot(a - a_large, b_large, input_precision="tf32")
    c = tl.dot(a_large, b - b_large, c, input_precision="tf32")
    return tl.dot(a_large, b_large, c, input_precision="tf32")
