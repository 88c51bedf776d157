"""Elements as words and back, bit for bit; and the one cast that is allowed, ``quantize``."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

from layout_core.dtypes import DType
from layout_core.errors import TensorError, UnsupportedError
from layout_core.fp8 import FLOAT8_RULES, float8_rule

WORD_DTYPES: Final = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}
"""Words of a pool by their bits. XLA moves unsigned words and never rounds or widens them."""

STORED_DTYPES: Final = ("float32", "float16", "bfloat16", *FLOAT8_RULES)
"""Element types that this engine reads and writes."""

QUERY_DTYPES: Final = ("float32", "float16", "bfloat16")
"""Element types of queries and outputs."""


def array_dtype(dtype: DType) -> jnp.dtype:
    """JAX's dtype of an element type that this engine stores.

    Raises:
        UnsupportedError: the type is not stored; lists those that are.
    """
    if dtype.name not in STORED_DTYPES:
        raise UnsupportedError(
            f"dtype: jax_gpu stores {', '.join(STORED_DTYPES)}, the plan has {dtype}"
        )
    return jnp.dtype(dtype.name)


def to_words(array: jax.Array, word_bits: int) -> jax.Array:
    """``[..., E]`` elements as ``[..., E * bits / word_bits]`` words, bits unchanged.

    An element wider than a word becomes several, the least significant first, as in memory.
    """
    words = lax.bitcast_convert_type(array, WORD_DTYPES[word_bits])
    if words.ndim > array.ndim:
        words = words.reshape(*array.shape[:-1], -1)
    return words


def from_words(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``[..., W]`` words as elements, bits unchanged; the reverse of :func:`to_words`."""
    ratio = dtype.itemsize // words.dtype.itemsize
    if ratio > 1:
        words = words.reshape(*words.shape[:-1], words.shape[-1] // ratio, ratio)
    return lax.bitcast_convert_type(words, dtype)


def quantize(x: jax.Array, scale: float | jax.Array, dtype: object) -> jax.Array:
    """``x / scale`` as 8-bit floats, by the rule of :mod:`layout_core.fp8`.

    Args:
        x: float32, float16 or bfloat16, of any shape.
        scale: a number > 0; reading multiplies by it (``k_scale``, ``v_scale``).
        dtype: an 8-bit float type, by name or as a dtype.

    Returns:
        Values rounded to nearest even and saturated: 466 gives 0x7e in e4m3fn. A NaN gives
        the rule's byte. The bytes equal those of the torch engine's ``quantize``.

    Raises:
        UnsupportedError: ``dtype`` is no 8-bit float.
        TensorError: ``x`` is of another dtype, or the scale is a number that is not > 0.
    """
    target = DType.parse(dtype)
    rule = float8_rule(target)
    if DType.parse(x.dtype).name not in QUERY_DTYPES:
        raise TensorError(f"x: quantize expects {', '.join(QUERY_DTYPES)}, got {x.dtype}")
    if isinstance(scale, (int, float)) and not 0 < scale < float("inf"):
        raise TensorError(f"scale: expected a finite number > 0, got {scale!r}")
    # XLA turns a division by a broadcast scalar into a product with its reciprocal, which
    # rounds otherwise than torch; a barrier behind the broadcast keeps the division
    divisor: jax.Array = lax.optimization_barrier(  # type: ignore[no-untyped-call]
        jnp.broadcast_to(jnp.asarray(scale, jnp.float32), x.shape)
    )
    wide = x.astype(jnp.float32) / divisor
    bounded = jnp.clip(wide, -rule.largest, rule.largest)
    words = lax.bitcast_convert_type(bounded.astype(jnp.dtype(target.name)), jnp.uint8)
    words = jnp.where(jnp.isnan(wide), jnp.uint8(rule.nan_byte), words)
    return lax.bitcast_convert_type(words, jnp.dtype(target.name))
