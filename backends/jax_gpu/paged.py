"""Paged attention steps: write the step's K/V, then attend over each row's pages."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from backends.jax_gpu.allocator import JaxPool, is_traced
from backends.jax_gpu.batch import BatchArrays, JaxBatch
from backends.jax_gpu.donation import Donation
from backends.jax_gpu.dtypes import QUERY_DTYPES
from backends.jax_gpu.kernels import xla
from backends.jax_gpu.layers import AnyLayer, check_stored, place_of
from backends.jax_gpu.paging import Address, CellShape, write_cells
from layout_core.dtypes import DType
from layout_core.errors import PoolError, TensorError
from layout_core.serving import check_array, check_same_plan, check_scalars

Scalars = tuple[Any, Any, Any]
"""What multiplies the scores, what multiplies the output, and the softcap or ``None``."""


def forward_paged(
    pool: JaxPool,
    layer: AnyLayer,
    query: Any,
    key: Any,
    value: Any,
    batch: JaxBatch,
    donation: Donation,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[jax.Array, JaxPool]:
    """One step of one layer; see :meth:`JaxEngine.forward_paged`."""
    words = pool.words
    _check_batch(pool, batch)
    view, cell, address = place_of(pool, layer, batch.group)
    check_scalars(softmax_scale, softcap, k_scale, v_scale)
    tokens, query_dtype = batch.num_tokens, DType.parse(query.dtype)
    check_array(
        "query",
        view.name,
        query.shape,
        query_dtype,
        expected_shape=(tokens, batch.shape.num_heads, cell.head_size),
        expected_dtype=None,
    )
    if query_dtype.name not in QUERY_DTYPES:
        raise TensorError(
            f"query: layer {view.name!r} expects one of {', '.join(QUERY_DTYPES)}, "
            f"got {query_dtype}"
        )
    if (key is None) != (value is None):
        given = "value" if key is None else "key"
        raise TensorError(f"key, value: layer {view.name!r} expects both or neither, got {given}")
    scale = cell.head_size**-0.5 if softmax_scale is None else softmax_scale
    scalars: Scalars = (
        np.float32(scale * k_scale),
        np.float32(v_scale),
        np.float32(softcap) if softcap else None,
    )
    arrays = batch.arrays  # not the batch: plans that differ share programs
    if key is None:
        if is_traced(words, query, arrays.lo, *address):
            return _attend(words, cell, address, query, arrays, scalars), pool
        return _attend_program(words, cell, address, query, arrays, scalars), pool
    check_stored(view, tokens, key, value)
    arguments = (cell, address, query, key, value, arrays, scalars)
    if is_traced(words, query, key, value, arrays.lo, *address):
        output, new = _step(words, *arguments)
    else:
        output, new = donation.run("forward_paged", _step_program, pool, words, arguments)
    return output, pool.with_words(new)


def _check_batch(pool: JaxPool, batch: JaxBatch) -> None:
    """Raise unless the batch was prepared for the pool's plan, and nothing changed since."""
    if pool.is_portable != batch.is_portable:
        portable = "pool" if pool.is_portable else "batch"
        raise PoolError(
            f"batch: the {portable} is portable and the other is not; call portable() on both"
        )
    if not pool.is_portable:
        check_same_plan(pool.plan.resolved, batch.resolved)
    elif pool.plan != batch.shape.plan:
        raise PoolError("batch: it was prepared for other layers, or a pool of another size")
    batch.check_fresh()


def _attend(
    words: jax.Array,
    cell: CellShape,
    address: Address,
    query: jax.Array,
    arrays: BatchArrays,
    scalars: Scalars,
) -> jax.Array:
    score_scale, value_scale, softcap = scalars
    output, _ = xla.paged_attention(
        words,
        cell,
        address,
        query,
        arrays.block_table,
        arrays.cu_seqlens,
        arrays.row_lo,
        arrays.row_hi,
        arrays.lo,
        arrays.hi,
        score_scale=score_scale,
        value_scale=value_scale,
        softcap=softcap,
    )
    return output


def _step(
    words: jax.Array,
    cell: CellShape,
    address: Address,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    arrays: BatchArrays,
    scalars: Scalars,
) -> tuple[jax.Array, jax.Array]:
    # the read depends on the write, so XLA changes the pool in place
    words = write_cells(words, cell, address, key, value, arrays.slots)
    return _attend(words, cell, address, query, arrays, scalars), words


_attend_program = jax.jit(_attend, static_argnums=1)
_step_program = jax.jit(_step, static_argnums=1, donate_argnums=0)
