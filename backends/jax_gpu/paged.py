"""Paged attention steps: write the step's K/V, then attend over each row's pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from backends.jax_gpu.allocator import JaxPool, is_traced
from backends.jax_gpu.batch import JaxBatch
from backends.jax_gpu.donation import Donation
from backends.jax_gpu.dtypes import QUERY_DTYPES
from backends.jax_gpu.kernels.base import BatchArrays, Program, Scalars
from backends.jax_gpu.layers import AnyLayer, check_stored, place_of
from backends.jax_gpu.paging import Address
from layout_core.dtypes import DType
from layout_core.errors import PoolError, TensorError
from layout_core.serving import check_array, check_same_plan, check_scalars
from layout_core.views import LayerView


@dataclass(frozen=True, slots=True)
class CallShape:
    """What the arrays of one call must be; with several ranks, of all ranks together."""

    tokens: int
    num_heads: int  #: query heads
    view: LayerView  #: the layer; its KV heads are those of all ranks


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
    scalars = scalars_of(view, softmax_scale, softcap, k_scale, v_scale)
    check_call(CallShape(batch.num_tokens, batch.shape.num_heads, view), query, key, value)
    program = Program(cell, *batch.shape.bound)
    arrays = batch.arrays  # not the batch: plans that differ share programs
    if key is None:
        if is_traced(words, query, arrays.lo, *address):
            return attend(words, program, address, query, arrays, scalars), pool
        return _attend_program(words, program, address, query, arrays, scalars), pool
    arguments = (program, address, query, key, value, arrays, scalars)
    if is_traced(words, query, key, value, arrays.lo, *address):
        output, new = step(words, *arguments)
    else:
        output, new = donation.run("forward_paged", _step_program, pool, words, arguments)
    return output, pool.with_words(new)


def scalars_of(
    view: LayerView, softmax_scale: float | None, softcap: float, k_scale: float, v_scale: float
) -> Scalars:
    """The numbers of a call, checked, as what they multiply.

    Raises:
        TensorError: a number out of range.
    """
    check_scalars(softmax_scale, softcap, k_scale, v_scale)
    scale = view.head_size**-0.5 if softmax_scale is None else softmax_scale
    return (
        np.float32(scale * k_scale),
        np.float32(v_scale),
        np.float32(softcap) if softcap else None,
    )


def check_call(shape: CallShape, query: Any, key: Any, value: Any) -> None:
    """Raise unless the arrays of a call are what its batch and layer want.

    Raises:
        TensorError: a shape, a dtype, or one of K and V alone.
    """
    view, query_dtype = shape.view, DType.parse(query.dtype)
    check_array(
        "query",
        view.name,
        query.shape,
        query_dtype,
        expected_shape=(shape.tokens, shape.num_heads, view.head_size),
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
    if key is not None:
        check_stored(view, shape.tokens, key, value)


def of_all_ranks(view: LayerView, ranks: int) -> LayerView:
    """A rank's view with the KV heads of all ranks: for checks of shapes, not for addressing."""
    return replace(view, num_kv_heads=view.num_kv_heads * ranks)


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


def attend(
    words: jax.Array,
    program: Program,
    address: Address,
    query: jax.Array,
    arrays: BatchArrays,
    scalars: Scalars,
) -> jax.Array:
    """The output of a step whose K/V are written: pure, for use inside a program."""
    cell, kernel, work = program
    output, _ = kernel.attend(words, cell, address, query, arrays, scalars, work)
    return output


def step(
    words: jax.Array,
    program: Program,
    address: Address,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    arrays: BatchArrays,
    scalars: Scalars,
) -> tuple[jax.Array, jax.Array]:
    """Write, then attend: ``(output, words)``, pure."""
    # the read depends on the write, so XLA changes the pool in place
    words = program.kernel.write(words, program.cell, address, key, value, arrays.slots)
    return attend(words, program, address, query, arrays, scalars), words


_attend_program = jax.jit(attend, static_argnums=1)
_step_program = jax.jit(step, static_argnums=1, donate_argnums=0)
