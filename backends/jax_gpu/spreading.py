"""From the model's heads to the ranks' and back, as :class:`layout_core.heads.HeadPlan` says."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from backends.jax_gpu.dtypes import from_words, to_words
from layout_core.errors import TensorError
from layout_core.heads import HeadPlan


def spread_queries(query: jax.Array, heads: HeadPlan) -> jax.Array:
    """``[T, Hq, D]`` with the model's query heads as ``[T, tensor * heads_per_rank, D]``.

    Padded heads are zeros.

    Raises:
        TensorError: another number of heads than ``heads.real_heads``.
    """
    _check_heads("query", query, heads.real_heads)
    places = [heads.query_head(head) for head in range(heads.num_heads)]
    return spread(query, places)


def spread_keys(array: jax.Array, heads: HeadPlan) -> jax.Array:
    """K or V, ``[T, Hkv, D]``, as ``[T, tensor * kv_heads_per_rank, D]``.

    A head that several ranks hold is repeated; padded heads are zeros.

    Raises:
        TensorError: another number of heads than ``heads.real_kv_heads``.
    """
    _check_heads("array", array, heads.real_kv_heads)
    places = [head if head < heads.real_kv_heads else None for own in heads.owners for head in own]
    return spread(array, places)


def gather_queries(output: jax.Array, heads: HeadPlan) -> jax.Array:
    """``[T, tensor * heads_per_rank, Dv]`` as ``[T, Hq, Dv]``: the reverse of
    :func:`spread_queries`, with padded heads cut off.

    Raises:
        TensorError: another number of heads than ``heads.num_heads``.
    """
    _check_heads("output", output, heads.num_heads)
    real = {heads.query_head(head): head for head in range(heads.num_heads)}
    return output[:, np.array([real[head] for head in range(heads.real_heads)])]


def _check_heads(name: str, array: jax.Array, expected: int) -> None:
    if array.ndim != 3 or array.shape[1] != expected:
        raise TensorError(
            f"{name}: expected [T, {expected}, D], one entry for each head, got {[*array.shape]}"
        )


def spread(array: jax.Array, places: Sequence[int | None]) -> jax.Array:
    """Heads at their places, zeros where there is none; as words, since XLA changes NaN bits."""
    words = to_words(array, array.itemsize * 8)
    moved = words[:, np.array([place or 0 for place in places])]
    padded = np.array([place is None for place in places])
    if padded.any():
        moved = jnp.where(padded[:, None], jnp.zeros((), words.dtype), moved)
    return from_words(moved, array.dtype)


def places_of_heads(heads: HeadPlan) -> list[int]:
    """For each KV head of the model its place on the axis of all ranks' heads."""
    per_rank = heads.kv_heads_per_rank
    return [rank * per_rank + index for rank, index in heads.sources]
