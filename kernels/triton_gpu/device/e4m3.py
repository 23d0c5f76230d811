"""Eight-bit floating point, e4m3fn, by integer arithmetic: on any GPU, and the same on all of them.

Sign, 4 bits of exponent (bias 7), 3 of fraction; no infinity; 0x7F and 0xFF are NaN; greatest 448.
"""

import triton
import triton.language as tl


@triton.jit
def decode(bits):
    """uint8 -> float16 that holds value / 256, exactly: the caller puts 256 into its scale.

    Exponent and fraction move to where float16 has them, whose bias is 8 more.
    """
    wide = bits.to(tl.uint16)
    magnitude = wide & 0x7F
    half = tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7) | ((wide & 0x80) << 8)
    return half.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def encode(x):
    """float32 -> uint8: to the nearest, ties to even, at most +-448; NaN stays NaN."""
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 960: (127 - 7) << 3
    tiny = (size + 16384.0).to(tl.uint32, bitcast=True) & 0xF  # float32 there counts in 2**-9
    magnitude = tl.where(size < 0.015625, tiny, normal)
    return (sign | tl.where(x == x, magnitude, 0x7F)).to(tl.uint8)
