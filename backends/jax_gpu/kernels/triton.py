"""Kernel ``triton``: the kernels of :mod:`backends.triton_kernels`, launched from JAX programs.

Every launch is described there; here its buffers are filled with JAX arrays. A layer's place goes
in as data, so equal layers, and all layouts, share a program; the pool goes in and out as one
buffer, which the kernel changes in place. The work list of a batch is one of its leaves.

What is chosen for a batch (tiles, splits) follows from its shapes alone, so that other rows in
the same bucket run the same program. ``jax.vmap`` over a launch raises, as ``jax_triton`` has no
rule for it: put the samples into the rows of one batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backends.jax_gpu.dtypes import QUERY_DTYPES, to_words
from backends.jax_gpu.kernels.base import BatchArrays, KernelCase, Scalars, Tables
from backends.jax_gpu.paging import Address, CellShape
from backends.triton_kernels.configs import (
    ITEM_BYTES,
    TileShape,
    choose_splits,
    choose_tile,
    refuse,
)
from backends.triton_kernels.launch import Buffer, Launch, Scalar
from backends.triton_kernels.tiles import TILE_FIELDS, pad_tiles, query_tiles, tile_capacity
from layout_core.errors import UnsupportedError
from layout_core.rows import PAD_SLOT
from layout_core.step import StepPlan

PLATFORMS = ("gpu",)
"""Where it runs, as JAX names platforms."""


@dataclass(frozen=True, slots=True)
class Chip:
    """What choices depend on."""

    capability: tuple[int, int]
    num_sms: int


def chip_of(device: jax.Device) -> Chip:
    """The chip of a CUDA device."""
    major, minor = str(device.compute_capability).split(".")
    return Chip((int(major), int(minor)), int(device.core_count))


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What was chosen for one kind of layer and one type of query."""

    cell: CellShape
    query_dtype: str
    shape: TileShape
    num_splits: int
    num_tiles: int  #: that there is room for, and that are launched
    table: int  #: which of the batch's tables


TritonWork = tuple[LayerWork, ...]

Launcher = Callable[[Launch, Mapping[str, jax.Array], Chip], dict[str, jax.Array]]
"""Runs a launch on arrays by buffer name, and gives what it wrote by buffer name."""


def launch_by_jax_triton(
    launch: Launch, buffers: Mapping[str, jax.Array], chip: Chip
) -> dict[str, jax.Array]:
    """The launch as an operation of the program that is being built."""
    import jax_triton  # type: ignore[import-untyped]  # changes the environment when it is imported, so not before it is needed

    arguments = [p.value if isinstance(p, Scalar) else buffers[p.buffer] for p in launch.inputs]
    outputs = jax_triton.triton_call(
        *arguments,
        kernel=launch.kernel,
        out_shape=[output_shape(p, buffers) for p in launch.outputs],
        grid=launch.grid,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        compute_capability=chip.capability[0] * 10 + chip.capability[1],
        input_output_aliases=launch.aliases,
        name=launch.kernel.__name__,
        **launch.constexprs,
    )
    return {p.buffer: out for p, out in zip(launch.outputs, outputs, strict=True)}


def output_shape(output: Buffer, buffers: Mapping[str, jax.Array]) -> Any:
    """Shape and dtype of what a launch writes; those of the input where it is in place."""
    struct: Any = jax.ShapeDtypeStruct  # untyped in JAX
    if output.shape is None:
        before = buffers[output.buffer]
        return struct(before.shape, before.dtype)
    return struct(output.shape, jnp.dtype(output.dtype))


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """See the module.

    Args:
        chip: what tiles and splits are chosen for, and what is compiled for.
        platforms: where it runs. Tests name ``cpu``, with a launcher of their own.
        launcher: how a launch enters a program.
        upcast: multiply in float32, for Triton's interpreter, which multiplies bfloat16 wrongly.
    """

    chip: Chip
    platforms: tuple[str, ...] = PLATFORMS
    launcher: Launcher = launch_by_jax_triton
    upcast: bool = False

    @property
    def name(self) -> str:
        return "triton"

    def refuse(self, case: KernelCase) -> str | None:
        if case.platform not in self.platforms:
            return f"it runs on {', '.join(self.platforms)}, the device is {case.platform!r}"
        for cell in case.cells:
            reason = _refuse_cell(cell)
            if reason is not None:
                return reason
        return None

    def plan(self, case: KernelCase) -> TritonWork:
        kinds = [(cell, dtype) for cell in case.cells for dtype in _query_dtypes(cell)]
        shapes = [self._tile(case, cell, dtype) for cell, dtype in kinds]
        cuts = list(dict.fromkeys(shape.queries for shape in shapes))
        return tuple(
            LayerWork(
                cell=cell,
                query_dtype=dtype,
                shape=shape,
                num_splits=self._splits(case, cell, shape),
                num_tiles=tile_capacity(case.num_tokens, case.num_rows, shape.queries),
                table=cuts.index(shape.queries),
            )
            for (cell, dtype), shape in zip(kinds, shapes, strict=True)
        )

    def _tile(self, case: KernelCase, cell: CellShape, query_dtype: str) -> TileShape:
        return choose_tile(
            # rows of other lengths may come in the same shapes: the mean stands for all
            max_query_len=-(-case.num_tokens // max(case.num_rows, 1)),
            query_heads=case.num_heads,
            kv_heads=cell.num_kv_heads,
            head_size=cell.head_size,
            head_size_v=cell.head_size_v,
            query_dtype=query_dtype,
            dtype=cell.dtype,
            block_size=cell.block_size,
            capability=self.chip.capability,
        )

    def _splits(self, case: KernelCase, cell: CellShape, shape: TileShape) -> int:
        keys = case.max_keys
        one = array("i", (0, 0, shape.queries, 0, keys, 0, keys, 0))
        return choose_splits(
            one * -(-case.num_tokens // shape.queries),
            shape=shape,
            kv_heads=cell.num_kv_heads,
            num_sms=self.chip.num_sms,
        )

    def tables(self, work: TritonWork, step: StepPlan) -> Tables:
        cuts = {layer.table: layer for layer in work}
        return tuple(
            np.array(
                pad_tiles(
                    query_tiles(
                        step.cu_seqlens, step.num_tokens, step.lo, step.hi, layer.shape.queries
                    ),
                    layer.num_tiles,
                ),
                np.int32,
            ).reshape(layer.num_tiles, TILE_FIELDS)
            for _, layer in sorted(cuts.items())
        )

    def attend(
        self,
        words: jax.Array,
        cell: CellShape,
        address: Address,
        query: jax.Array,
        arrays: BatchArrays,
        scalars: Scalars,
        work: TritonWork,
    ) -> tuple[jax.Array, jax.Array]:
        from backends.triton_kernels.plans import plan_attention  # imports Triton

        tokens, num_heads, _ = query.shape
        rows, table_width = arrays.block_table.shape
        chosen = self._work_of(work, cell, str(query.dtype))
        if tokens == 0 or rows == 0 or table_width == 0:
            output = jnp.zeros((tokens, num_heads, cell.head_size_v), query.dtype)
            return output, jnp.full((tokens, num_heads), float("-inf"), jnp.float32)
        score_scale, value_scale, softcap = scalars
        launches = plan_attention(
            shape=chosen.shape,
            num_tokens=tokens,
            num_tiles=chosen.num_tiles,
            query_heads=num_heads,
            kv_heads=cell.num_kv_heads,
            head_size=cell.head_size,
            head_size_v=cell.head_size_v,
            block_size=cell.block_size,
            table_width=table_width,
            dtype=cell.dtype,
            query_dtype=chosen.query_dtype,
            unit=unit_of(cell),
            num_splits=chosen.num_splits,
            has_softcap=softcap is not None,
            scalars_in_memory=True,
            capability=self.chip.capability,
            upcast=self.upcast,
        )
        buffers: dict[str, jax.Array] = {
            "pool": words,
            "place": place_of_cells(address),
            "query": query,
            "tiles": arrays.tables[chosen.table],
            "lo": arrays.lo,
            "hi": arrays.hi,
            "block_table": arrays.block_table,
            "score_scale": _number(score_scale),
            "value_scale": _number(value_scale),
            "softcap": _number(0.0 if softcap is None else softcap),
        }
        for launch in launches:
            buffers.update(self.launcher(launch, buffers, self.chip))
        return buffers["out"], buffers["lse"]

    def _work_of(self, work: TritonWork, cell: CellShape, query_dtype: str) -> LayerWork:
        for layer in work:
            if layer.cell == cell and layer.query_dtype == query_dtype:
                return layer
        raise UnsupportedError(
            f"query: kernel 'triton' takes {', '.join(_query_dtypes(cell))} over a pool of "
            f"{cell.dtype}, got {query_dtype}; kernel 'xla' takes any"
        )

    def write(
        self,
        words: jax.Array,
        cell: CellShape,
        address: Address,
        key: jax.Array,
        value: jax.Array,
        slots: jax.Array,
    ) -> jax.Array:
        from backends.triton_kernels.plans import plan_write

        launch = plan_write(
            num_tokens=slots.shape[0],
            kv_heads=cell.num_kv_heads,
            head_size=cell.head_size,
            head_size_v=cell.head_size_v,
            block_size=cell.block_size,
            dtype=cell.dtype,
            unit=unit_of(cell),
        )
        if launch.is_empty:
            return words
        slots = slots.astype(jnp.int32)
        inside = (slots >= 0) & (slots < address.num_slots)
        bits = ITEM_BYTES[cell.dtype] * 8  # as words: chips without a type must not see it
        buffers = {
            "pool": words,
            "place": place_of_cells(address),
            "key": to_words(key, bits),
            "value": to_words(value, bits),
            "slots": jnp.where(inside, slots, PAD_SLOT),
        }
        return self.launcher(launch, buffers, self.chip)["pool"]

    def copy(
        self,
        words: jax.Array,
        cell: CellShape,
        address: Address,
        source: jax.Array,
        target: jax.Array,
    ) -> jax.Array:
        from backends.triton_kernels.plans import plan_copy_blocks

        places = place_of_cells(address)
        launch = plan_copy_blocks(
            num_pairs=source.shape[0],
            num_layers=places.shape[0],
            kv_heads=cell.num_kv_heads,
            head_size=cell.head_size,
            head_size_v=cell.head_size_v,
            block_size=cell.block_size,
            dtype=cell.dtype,
            unit=unit_of(cell),
        )
        if launch.is_empty:
            return words
        # a padded pair copies a block to itself: the same bytes to the same place
        padded = target < 0
        buffers = {
            "pool": words,
            "places": places,
            "source": jnp.where(padded, 0, source),
            "destination": jnp.where(padded, 0, target),
        }
        return self.launcher(launch, buffers, self.chip)["pool"]


def place_of_cells(address: Address) -> jax.Array:
    """``[..., 4]``: offset, and strides of blocks, heads and tokens, in rows of the pool."""
    return jnp.stack([jnp.asarray(number, jnp.int32) for number in address[:4]], axis=-1)


def unit_of(cell: CellShape) -> int:
    """Elements of a row of the pool, the unit that a layer's place counts in."""
    return cell.words_per_row * cell.word_bits // (8 * ITEM_BYTES[cell.dtype])


def _refuse_cell(cell: CellShape) -> str | None:
    if cell.dtype in ITEM_BYTES:
        row_bytes = cell.words_per_row * cell.word_bits // 8
        if row_bytes % ITEM_BYTES[cell.dtype]:
            return (
                f"a row of the pool has {row_bytes} bytes, no multiple of the "
                f"{ITEM_BYTES[cell.dtype]} of {cell.dtype}; pad the page to a multiple"
            )
    for query_dtype in _query_dtypes(cell):
        reason = refuse(
            head_size=cell.head_size,
            head_size_v=cell.head_size_v,
            dtype=cell.dtype,
            query_dtype=query_dtype,
        )
        if reason is not None:
            return reason
    return None


def _query_dtypes(cell: CellShape) -> tuple[str, ...]:
    """What queries may be: the pool's own type, or any over 8-bit storage."""
    return (cell.dtype,) if cell.dtype in QUERY_DTYPES else QUERY_DTYPES


def _number(value: Any) -> jax.Array:
    return jnp.asarray(value, jnp.float32).reshape(1)
