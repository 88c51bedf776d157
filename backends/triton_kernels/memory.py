"""Where a layer's cells lie, as device code: the one place where strides meet block ids.

A layer's place is an array of integers, ``offset, block_stride, head_stride, token_stride``,
in units of ``UNIT`` elements. As ``UNIT`` is known to the compiler, it knows how far every
address is divisible, and so how wide a load may be; the numbers themselves stay data.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# The functions below are Triton's, not Python's: their arguments have no Python types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def typed_pointer(pointer, DTYPE: tl.constexpr):
    """The pool's address as a pointer to elements of ``DTYPE``, whatever words it is made of."""
    if DTYPE == "float32":
        typed = pointer.to(tl.pointer_type(tl.float32))
    elif DTYPE == "float16":
        typed = pointer.to(tl.pointer_type(tl.float16))
    elif DTYPE == "bfloat16":
        typed = pointer.to(tl.pointer_type(tl.bfloat16))
    elif DTYPE == "uint32":
        typed = pointer.to(tl.pointer_type(tl.uint32))
    elif DTYPE == "uint16":
        typed = pointer.to(tl.pointer_type(tl.uint16))
    else:  # bytes, of 8-bit floats too
        typed = pointer.to(tl.pointer_type(tl.uint8))
    return typed


@triton.jit
def load_place(place):
    """``offset, block_stride, head_stride, token_stride``, 64 bits wide: pools pass 2^31."""
    offset = tl.load(place).to(tl.int64)
    block_stride = tl.load(place + 1).to(tl.int64)
    head_stride = tl.load(place + 2).to(tl.int64)
    token_stride = tl.load(place + 3).to(tl.int64)
    return offset, block_stride, head_stride, token_stride


@triton.jit
def decode_e4m3(bits):
    """Bytes of float8 e4m3fn as float16, exactly: NaN, zeros and subnormal numbers included."""
    wide = bits.to(tl.uint16)
    magnitude = wide & 0x7F
    # a float16 of the same fields has an exponent that is 8 too small
    half = (((wide & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), half.to(tl.float32)).to(tl.float16)


@triton.jit
def decode_e5m2(bits):
    """Bytes of float8 e5m2 as float16: the upper half of one."""
    return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def decode(raw, DTYPE: tl.constexpr, COMPUTE: tl.constexpr):
    """Loaded elements of ``DTYPE`` in the dtype that they are multiplied in."""
    if DTYPE == "native_float8_e4m3fn":
        values = raw.to(tl.float8e4nv, bitcast=True)
    elif DTYPE == "float8_e4m3fn":
        values = decode_e4m3(raw)
    elif DTYPE == "float8_e5m2":
        values = decode_e5m2(raw)
    else:
        values = raw
    return values.to(COMPUTE)
