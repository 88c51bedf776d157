"""Cells of the flat pool: where they lie, how they are read, written and copied.

The pool is ``[num_rows, words_per_row]``. Every place is integer arithmetic on the numbers of
:func:`layout_core.views.row_geometry`; strides and offset of a layer are data, so that equal
layers share a compiled program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from backends.jax_gpu.dtypes import array_dtype, from_words, to_words
from layout_core.errors import IndexLimitError
from layout_core.rows import PAD_SLOT
from layout_core.serving import check_copy_pairs
from layout_core.views import ResolvedLayout, RowGeometry, row_geometry

INDEX_LIMIT = 2**31 - 1
"""Row numbers are int32: the largest one that may occur, padded slots' included."""


@dataclass(frozen=True, slots=True)
class CellShape:
    """What a program is compiled for: equal for layers that differ only in where they lie."""

    num_kv_heads: int
    block_size: int  #: tokens of a block as the layer's view counts them
    head_size: int
    head_size_v: int
    dtype: str
    word_bits: int
    key_words: int  #: words of K at the start of a cell; V follows
    value_words: int
    words_per_row: int
    rows_per_cell: int


class Address(NamedTuple):
    """Where a layer lies, in rows: scalars, or one entry for each of several layers."""

    offset: jax.Array
    block_stride: jax.Array
    head_stride: jax.Array
    token_stride: jax.Array
    num_slots: jax.Array


class PoolPlan:
    """A resolved layout as this engine addresses it; static under ``jax.jit``.

    Hashing is cheap and comparing is by identity first, because JAX does both at every call.
    """

    __slots__ = ("_hash", "addresses", "cells", "geometry", "resolved")

    resolved: ResolvedLayout
    geometry: RowGeometry
    cells: tuple[CellShape, ...]  #: for each layer
    addresses: np.ndarray[tuple[int, int], np.dtype[np.int32]]  #: [layers, 5], see Address

    def __init__(self, resolved: ResolvedLayout) -> None:
        geometry = row_geometry(resolved)
        _check_index_range(geometry)
        cells, addresses = [], []
        for view, rows in zip(resolved.layers, geometry.layers, strict=True):
            element = array_dtype(view.dtype).itemsize * 8
            cells.append(
                CellShape(
                    num_kv_heads=view.num_kv_heads,
                    block_size=view.block_size,
                    head_size=view.head_size,
                    head_size_v=view.head_size_v,
                    dtype=view.dtype.name,
                    word_bits=geometry.word_bits,
                    key_words=view.head_size * element // geometry.word_bits,
                    value_words=view.head_size_v * element // geometry.word_bits,
                    words_per_row=geometry.words_per_row,
                    rows_per_cell=rows.rows_per_cell,
                )
            )
            addresses.append(
                (
                    rows.offset,
                    rows.block_stride if view.shape[0] > 1 else 0,
                    rows.head_stride if view.shape[1] > 1 else 0,
                    rows.token_stride if view.shape[2] > 1 else 0,
                    view.shape[0] * view.block_size,
                )
            )
        self.resolved = resolved
        self.geometry = geometry
        self.cells = tuple(cells)
        self.addresses = np.array(addresses, dtype=np.int32)
        self._hash = hash((resolved.layout, resolved.size_bytes, resolved.num_blocks))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PoolPlan) and self.resolved == other.resolved)

    @property
    def shape(self) -> tuple[int, int]:
        """``(num_rows, words_per_row)`` of the pool's array."""
        return self.geometry.num_rows, self.geometry.words_per_row

    def template(self) -> PlanTemplate:
        """This plan without the places of its layers."""
        return PlanTemplate(self)


class PlanTemplate(PoolPlan):
    """What plans have in common that differ only in where their layers lie.

    Two templates are equal where the layers' names, groups and cells and the pool's array are.
    ``resolved`` is then one plan of many, and only what is equal in all of them may be read from
    it; where the layers lie comes with the pool, as data.
    """

    __slots__ = ("_key",)

    def __init__(self, plan: PoolPlan) -> None:
        self.resolved = plan.resolved
        self.geometry = plan.geometry
        self.cells = plan.cells
        self.addresses = plan.addresses
        layers = tuple((view.name, view.group) for view in plan.resolved.layers)
        self._key = (plan.shape, plan.cells, layers)
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PlanTemplate) and self._key == other._key)

    def template(self) -> PlanTemplate:
        """Itself."""
        return self


def _check_index_range(geometry: RowGeometry) -> None:
    if geometry.num_rows > INDEX_LIMIT:
        raise IndexLimitError(
            f"resolved: the pool has {geometry.num_rows} rows of {geometry.row_bytes} bytes; rows "
            f"are addressed in int32, so at most {INDEX_LIMIT}"
        )


def as_address(numbers: jax.Array | np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Address:
    """The five numbers of a layer, ``[..., 5]``, as an :class:`Address`."""
    return Address(*(jnp.asarray(numbers[..., i]) for i in range(5)))


def read_cells(words: jax.Array, cell: CellShape, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K and V of the cells that start at these rows, in the stored type.

    Args:
        words: the pool.
        rows: int32, any shape; each must be the first row of a cell.

    Returns:
        ``(key [..., D], value [..., Dv])``.
    """
    window = (cell.rows_per_cell, cell.words_per_row)
    flat = _gather(words, rows.reshape(-1), window).reshape(*rows.shape, -1)
    dtype = jnp.dtype(cell.dtype)
    end = cell.key_words + cell.value_words
    return (
        from_words(flat[..., : cell.key_words], dtype),
        from_words(flat[..., cell.key_words : end], dtype),
    )


def write_cells(
    words: jax.Array,
    cell: CellShape,
    address: Address,
    key: jax.Array,
    value: jax.Array,
    slots: jax.Array,
) -> jax.Array:
    """The pool with ``key [T, H, D]`` and ``value [T, H, Dv]`` stored at ``slots [T]``.

    A slot outside the layer's blocks, −1 above all, is not written: it becomes a row of its
    own past the end, which the scatter drops. The other slots must be distinct. K and V go in
    by two windowed scatters, so no concatenation is made; only where their boundary is not on
    a row is the cell joined first.
    """
    heads = cell.num_kv_heads
    tokens = slots.shape[0]
    num_rows = words.shape[0]
    if num_rows + tokens * heads * cell.rows_per_cell > INDEX_LIMIT:
        raise IndexLimitError(
            f"slots: {tokens} tokens of {heads} heads need row numbers past {INDEX_LIMIT} in a "
            f"pool of {num_rows} rows; write fewer tokens at once"
        )
    head = jnp.arange(heads, dtype=jnp.int32)
    slot = slots.astype(jnp.int32)[:, None]
    rows = _rows_of_slots(cell, address, slot)  # a slot of −1 gives some row, replaced below
    past_end = num_rows + cell.rows_per_cell * (
        jnp.arange(tokens, dtype=jnp.int32)[:, None] * heads + head
    )
    kept = (slot >= 0) & (slot < address.num_slots)
    rows = jnp.where(kept, rows, past_end).reshape(-1)

    width, per_cell = cell.words_per_row, cell.rows_per_cell
    key_words = to_words(key, cell.word_bits).reshape(tokens * heads, cell.key_words)
    value_words = to_words(value, cell.word_bits).reshape(tokens * heads, cell.value_words)
    if per_cell == 1:
        words = _scatter(words, rows, 0, key_words[:, None])
        return _scatter(words, rows, cell.key_words, value_words[:, None])
    if cell.key_words % width == 0:
        key_rows = cell.key_words // width
        words = _scatter(words, rows, 0, key_words.reshape(-1, key_rows, width))
        values = value_words.reshape(-1, per_cell - key_rows, width)
        return _scatter(words, rows + key_rows, 0, values)
    joined = jnp.concatenate([key_words, value_words], axis=1)
    return _scatter(words, rows, 0, joined.reshape(-1, per_cell, width))


def read_slots(
    words: jax.Array, cell: CellShape, address: Address, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``key [T, H, D]`` and ``value [T, H, Dv]`` at ``slots [T]``; zeros for a slot outside the
    layer's blocks, −1 above all.
    """
    slot = slots.astype(jnp.int32)[:, None]
    kept = (slot >= 0) & (slot < address.num_slots)
    key, value = read_cells(words, cell, _rows_of_slots(cell, address, jnp.where(kept, slot, 0)))

    def or_zero(array: jax.Array) -> jax.Array:
        words = to_words(array, array.itemsize * 8)  # a selection of floats changes NaN bits
        kept_words = jnp.where(kept[..., None], words, jnp.zeros((), words.dtype))
        return from_words(kept_words, array.dtype)

    return or_zero(key), or_zero(value)


def _rows_of_slots(cell: CellShape, address: Address, slot: jax.Array) -> jax.Array:
    """First rows ``[T, H]`` of the cells of int32 slots ``[T, 1]``."""
    return (
        address.offset
        + lax.div(slot, cell.block_size) * address.block_stride
        + lax.rem(slot, cell.block_size) * address.token_stride
        + jnp.arange(cell.num_kv_heads, dtype=jnp.int32) * address.head_stride
    )


class BlockCopies(NamedTuple):
    """Copies of whole blocks in equal layers."""

    cell: CellShape
    layers: list[int]
    source: np.ndarray[tuple[int], np.dtype[np.int32]]  #: [P], blocks as the views count them
    target: np.ndarray[tuple[int], np.dtype[np.int32]]  #: [P], padded with −1


def block_copies(
    plan: PoolPlan, pairs: Sequence[tuple[int, int]], group: int, room: int
) -> list[BlockCopies]:
    """Copies of manager blocks in every layer of a group, one entry for each kind of cell.

    Args:
        room: at least the number of pairs; padded to a power of two, so that other numbers of
            pairs run the same program.

    Raises:
        BlockTableError: see :func:`layout_core.serving.check_copy_pairs`.
    """
    sources, targets = check_copy_pairs(plan.resolved, pairs, group)
    layers = plan.resolved.group_layers(group)
    ratio = plan.resolved.layers[layers[0]].blocks_per_manager_block
    count = (1 << max(room - 1, 0).bit_length()) * ratio

    def padded(blocks: Sequence[int], padding: int) -> Any:
        ids = [block * ratio + part for block in blocks for part in range(ratio)]
        return np.array(ids + [padding] * (count - len(ids)), dtype=np.int32)

    source, target = padded(sources, 0), padded(targets, PAD_SLOT)
    alike: dict[CellShape, list[int]] = {}
    for index in layers:
        alike.setdefault(plan.cells[index], []).append(index)
    return [BlockCopies(cell, indices, source, target) for cell, indices in alike.items()]


def copy_cells(
    words: jax.Array, cell: CellShape, address: Address, source: jax.Array, target: jax.Array
) -> jax.Array:
    """The pool with whole blocks copied in several equal layers.

    Args:
        address: one entry for each layer.
        source: int32 ``[P]``, blocks as the layers' views count them.
        target: int32 ``[P]``; −1 pads, and is not written.
    """
    heads = jnp.arange(cell.num_kv_heads, dtype=jnp.int32)[:, None]
    tokens = jnp.arange(cell.block_size, dtype=jnp.int32)

    def rows_of(blocks: jax.Array) -> jax.Array:  # [layers, P, H, N]
        offset, block_stride, head_stride, token_stride = (
            a[:, None, None, None] for a in address[:4]
        )
        return (
            offset
            + blocks[:, None, None] * block_stride
            + heads * head_stride
            + tokens * token_stride
        )

    rows = rows_of(target)
    past_end = words.shape[0] + cell.rows_per_cell * jnp.arange(rows.size, dtype=jnp.int32)
    rows = jnp.where(target[:, None, None] >= 0, rows, past_end.reshape(rows.shape))
    window = (cell.rows_per_cell, cell.words_per_row)
    cells = _gather(words, rows_of(source).reshape(-1), window)
    return _scatter(words, rows.reshape(-1), 0, cells)


def _gather(words: jax.Array, rows: jax.Array, window: tuple[int, int]) -> jax.Array:
    """Windows ``[n, *window]`` that start at column 0 of ``rows [n]``."""
    if window[0] == 1:  # the form that XLA reads fastest: a row, no window axis
        dims = lax.GatherDimensionNumbers(
            offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
        )
    else:
        dims = lax.GatherDimensionNumbers(
            offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,)
        )
    return lax.gather(
        words, rows[:, None], dims, window, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS
    ).reshape(-1, *window)


def _scatter(words: jax.Array, rows: jax.Array, column: int, windows: jax.Array) -> jax.Array:
    """The pool with ``windows [n, r, w]`` put at ``(rows[i], column)``; rows are distinct."""
    if windows.shape[1] == 1:
        dims = lax.ScatterDimensionNumbers(
            update_window_dims=(1,),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0, 1),
        )
        windows = windows[:, 0]
    else:
        dims = lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2),
            inserted_window_dims=(),
            scatter_dims_to_operand_dims=(0, 1),
        )
    starts = jnp.stack([rows, jnp.full_like(rows, column)], axis=1)
    return lax.scatter(
        words,
        starts,
        windows,
        dims,
        unique_indices=True,  # without it, narrow words become atomics on a GPU
        mode=lax.GatherScatterMode.FILL_OR_DROP,  # rows past the end are dropped
    )
