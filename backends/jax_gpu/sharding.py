"""One pool on several devices: KV heads over one axis of a mesh, rows over another.

Every rank has the same plan, for its share of the KV heads, and its own block of memory; the pool
is these stacked on a leading axis of devices. A step is the one-device step under ``shard_map``:
no rank reads another's memory, and nothing is sent.

Arrays keep the axes that they have on one device. The axis of tokens is that of the ranks of the
data axis one after another, each padded to one bucket; the axis of heads that of the ranks of the
tensor axis, as :class:`layout_core.heads.HeadPlan` divides them. :mod:`backends.jax_gpu.spreading`
goes between that and the model's heads, for a model whose projections do not already give it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from backends.jax_gpu import rank_programs
from backends.jax_gpu.allocator import host_view, is_traced
from backends.jax_gpu.batch import (
    BatchHost,
    BatchShape,
    check_same_shapes,
    host_arrays,
    kernel_case,
    replan,
)
from backends.jax_gpu.dtypes import WORD_DTYPES
from backends.jax_gpu.kernels.base import Program
from backends.jax_gpu.kernels.select import Toolkit, select_kernel, toolkit_for
from backends.jax_gpu.layers import AnyLayer, check_slots, check_stored, place_of
from backends.jax_gpu.paged import CallShape, check_call, of_all_ranks, scalars_of
from backends.jax_gpu.paging import PoolPlan, as_address, block_copies
from backends.jax_gpu.ranks import Ranks, ShardedBatch, ShardedPool
from backends.jax_gpu.spreading import places_of_heads, spread
from layout_core.errors import DeviceError, PoolError, RowError, TensorError
from layout_core.heads import HeadPlan
from layout_core.protocols import PrefixIndex
from layout_core.rows import BlockTables, Bucket, PagedAttentionRow
from layout_core.serving import check_num_heads, check_same_plan, check_servable
from layout_core.step import StepPlan, plan_step
from layout_core.views import ResolvedLayout
from layout_core.visibility import Spans, Visibility

DATA_AXIS = "data"
TENSOR_AXIS = "tensor"


def sharded_engine(
    mesh: Mesh, *, data_axis: str | None = DATA_AXIS, tensor_axis: str | None = TENSOR_AXIS
) -> ShardedEngine:
    """An engine on all devices of a mesh.

    Args:
        mesh: its axes are the two named here, or one of them; ``Mesh(devices, ("tensor",))``
            divides heads alone.
        data_axis: the axis that rows are divided over; not in the mesh, or ``None``: none is.
        tensor_axis: the axis that heads are divided over, likewise.

    Raises:
        DeviceError: the mesh has an axis that is neither.
    """
    named = {axis for axis in (data_axis, tensor_axis) if axis is not None}
    for axis in mesh.axis_names:
        if axis not in named:
            raise DeviceError(
                f"mesh: expected the axes {data_axis!r} and {tensor_axis!r}, or one of them, got "
                f"{list(mesh.axis_names)}"
            )
    return ShardedEngine(
        Ranks(
            mesh,
            data_axis if data_axis in mesh.axis_names else None,
            tensor_axis if tensor_axis in mesh.axis_names else None,
        )
    )


class ShardedEngine:
    """The calls of :class:`~backends.jax_gpu.engine.JaxEngine` on all ranks of a mesh at once.

    Inside of ``jit`` and ``scan`` they are plain and pure, as with one device.
    """

    def __init__(self, ranks: Ranks, toolkit: Toolkit | None = None) -> None:
        self._ranks = ranks
        self._toolkit = toolkit_for(ranks.mesh.devices.flat[0]) if toolkit is None else toolkit

    @property
    def ranks(self) -> Ranks:
        """The axes of the mesh that everything is divided over."""
        return self._ranks

    def __repr__(self) -> str:
        return f"ShardedEngine({self._ranks.data} x {self._ranks.tensor} ranks)"

    def allocate(self, resolved: ResolvedLayout) -> ShardedPool:
        """A zeroed pool of ``resolved.size_bytes`` on every rank.

        Args:
            resolved: the plan of one rank, with its share of the KV heads
                (``HeadPlan.kv_heads_per_rank``); equal on all.

        Raises:
            UnsupportedError, IndexLimitError: as with one device.
        """
        check_servable(resolved)
        plan = PoolPlan(resolved)
        words = jnp.zeros(
            (self._num_ranks, *plan.shape),
            WORD_DTYPES[plan.geometry.word_bits],
            device=self._ranks.sharding(self._ranks.pool),
        )
        return ShardedPool(words, plan, self._ranks)

    def load_bytes(self, resolved: ResolvedLayout, data: Sequence[bytes]) -> ShardedPool:
        """A pool that holds a copy of ``data``: the bytes of each rank, in order.

        Raises:
            PoolError: not one entry for each rank, or one of another length than the plan's.
            UnsupportedError, IndexLimitError: as with one device.
        """
        check_servable(resolved)
        plan = PoolPlan(resolved)
        if len(data) != self._num_ranks:
            raise PoolError(f"data: expected the bytes of {self._num_ranks} ranks, got {len(data)}")
        for rank, part in enumerate(data):
            if len(part) != resolved.size_bytes:
                raise PoolError(
                    f"data[{rank}]: expected {resolved.size_bytes} bytes, as many as the plan "
                    f"has, got {len(part)}"
                )
        host = np.frombuffer(b"".join(data), dtype=WORD_DTYPES[plan.geometry.word_bits])
        host = host.reshape(self._num_ranks, *plan.shape)
        # a real copy: an array that shares the caller's memory could not be donated
        sharding = self._ranks.sharding(self._ranks.pool)
        return ShardedPool(jnp.array(host, copy=True, device=sharding), plan, self._ranks)

    def pool_bytes(self, pool: ShardedPool) -> tuple[bytes, ...]:
        """The whole allocation of each rank, in address order."""
        return tuple(part.tobytes() for part in host_view(pool.words))

    def clear(self, pool: ShardedPool, *, prefix_index: PrefixIndex | None = None) -> ShardedPool:
        """Zeros in the memory of every rank, which is consumed; see ``Engine.clear``.

        Raises:
            PoolError: as :meth:`write`.
        """
        self._check_pool(pool)
        if prefix_index is not None:
            prefix_index.reset_prefix_cache()
        return self._changed(pool, "clear", rank_programs.CLEAR, (self._ranks,))

    def synchronize(self, pool: ShardedPool) -> None:
        """Wait until the program that returned ``pool`` is done on every rank."""
        pool.words.block_until_ready()

    def write(
        self, pool: ShardedPool, layer: AnyLayer, key: Any, value: Any, slots: Any
    ) -> ShardedPool:
        """Store K and V at the slots of each data rank; see ``JaxEngine.write``.

        Args:
            key: ``[data * T, tensor * Hkv, D]``.
            value: ``[data * T, tensor * Hkv, Dv]``.
            slots: ``[data * T]``.

        Raises:
            TensorError, BlockTableError, PoolError: as with one device.
        """
        self._check_pool(pool)
        view, cell, address = place_of(pool, layer)
        slots = check_slots(view, slots)
        self._check_divides("slots", slots.shape[0])
        check_stored(of_all_ranks(view, self._ranks.tensor), slots.shape[0], key, value)
        static = (self._ranks, Program(cell, self._toolkit.moves))
        arguments = (static, address, key, value, slots)
        return self._changed(pool, "write", rank_programs.WRITE, arguments)

    def copy_blocks(
        self,
        pool: ShardedPool,
        pairs: Sequence[Sequence[tuple[int, int]]],
        *,
        group: int = 0,
    ) -> ShardedPool:
        """Copy whole blocks ``(src, dst)`` in every layer of a group; consumes the pool.

        Args:
            pairs: the pairs of each data rank; they may differ in number.

        Raises:
            RowError: not one list for each data rank.
            BlockTableError, PoolError: as with one device; nothing was copied.
        """
        self._check_pool(pool)
        self._check_one_for_each("pairs", pairs)
        most = max(len(part) for part in pairs)
        copies = [block_copies(pool.plan, part, group, room=most) for part in pairs]
        if not most:
            return pool
        for parts in zip(*copies, strict=True):
            cell, indices = parts[0].cell, parts[0].layers
            source, target = (
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("source", "target")
            )
            arguments = (
                (self._ranks, Program(cell, self._toolkit.moves)),
                as_address(pool.addresses[np.array(indices)]),
                source,
                target,
            )
            pool = self._changed(pool, "copy_blocks", rank_programs.COPY, arguments)
        return pool

    def prepare(
        self,
        resolved: ResolvedLayout,
        rows: Sequence[Sequence[PagedAttentionRow]],
        tables: Sequence[BlockTables],
        *,
        visibility: Visibility,
        num_heads: int,
        group: int = 0,
        spans: Sequence[Sequence[Spans | None] | None] | None = None,
        kernel: str = "auto",
        bucket: Bucket | None = None,
    ) -> ShardedBatch:
        """Everything that a step needs on the ranks; see ``JaxEngine.prepare``.

        Args:
            resolved: the plan of one rank.
            rows, tables, spans: one entry for each data rank. Block ids are that rank's own.
            num_heads: query heads of one rank (``HeadPlan.heads_per_rank``).
            bucket: of one data rank. Without one, all must have the same shapes.

        Raises:
            RowError: not one entry for each data rank, or shapes that differ.
            Else as with one device.
        """
        check_num_heads(resolved, group, num_heads)
        self._check_one_for_each("rows", rows)
        self._check_one_for_each("tables", tables)
        if spans is not None:
            self._check_one_for_each("spans", spans)
        steps = [
            plan_step(
                resolved,
                part,
                table,
                visibility=visibility,
                group=group,
                spans=None if spans is None else spans[rank],
                bucket=bucket,
            )
            for rank, (part, table) in enumerate(zip(rows, tables, strict=True))
        ]
        for other in steps[1:]:
            check_same_shapes(steps[0], other)
        plan = PoolPlan(resolved)
        case = kernel_case(plan, steps[0], num_heads, self._toolkit.platform)
        shape = BatchShape(plan, group, num_heads, select_kernel(kernel, case, self._toolkit))
        return self._to_devices(shape, steps, tables)

    def update(
        self,
        batch: ShardedBatch,
        rows: Sequence[Sequence[PagedAttentionRow]],
        tables: Sequence[BlockTables],
    ) -> ShardedBatch:
        """A batch of the same shapes with new data; the same batch where nothing changed.

        Raises:
            RowError: a batch rebuilt from its leaves, or rows that do not fit its shapes.
        """
        if batch.hosts is None:
            raise RowError(
                "batch: it was rebuilt from its leaves and carries no rows; update the batch that "
                "prepare returned, outside of jit"
            )
        self._check_one_for_each("rows", rows)
        self._check_one_for_each("tables", tables)
        if all(
            host.tables is table and host.step.matches(part, table.version)
            for host, part, table in zip(batch.hosts, rows, tables, strict=True)
        ):
            return batch
        steps = [
            replan(host.step, part, table)
            for host, part, table in zip(batch.hosts, rows, tables, strict=True)
        ]
        return self._to_devices(batch.shape, steps, tables)

    def forward_paged(
        self,
        pool: ShardedPool,
        layer: AnyLayer,
        query: Any,
        key: Any,
        value: Any,
        batch: ShardedBatch,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> tuple[jax.Array, ShardedPool]:
        """Write K/V at the rows' positions, then attend, each rank with its heads and rows.

        Args:
            query: ``[data * T, tensor * Hq, D]``; ``T`` and ``Hq`` are those of one rank.
            key, value: ``[data * T, tensor * Hkv, D]`` and ``[..., Dv]``, or both ``None``.

        Returns:
            ``(output [data * T, tensor * Hq, Dv]``, divided as the query``, pool)``.

        Raises:
            StaleBatchError, TensorError, PoolError: as with one device.
        """
        self._check_pool(pool)
        words, ranks = pool.words, self._ranks
        check_same_plan(pool.resolved, batch.resolved)
        if batch.ranks != ranks:
            raise PoolError("batch: it was prepared for other ranks than the pool's")
        batch.check_fresh()
        view, cell, address = place_of(pool, layer, batch.shape.group)
        scalars = scalars_of(view, softmax_scale, softcap, k_scale, v_scale)
        heads = batch.shape.num_heads * ranks.tensor
        check_call(
            CallShape(batch.num_tokens, heads, of_all_ranks(view, ranks.tensor)), query, key, value
        )
        static = (ranks, Program(cell, *batch.shape.bound))
        if key is None:
            traced = is_traced(words, query, batch.arrays.lo, *address)
            run = rank_programs.attend if traced else rank_programs.attend_program
            return run(words, static, address, query, batch.arrays, scalars), pool
        arguments = (static, address, query, key, value, batch.arrays, scalars)
        if is_traced(words, query, key, value, batch.arrays.lo, *address):
            output, new = rank_programs.step(words, *arguments)
        else:
            output, new = rank_programs.step_program(words, *arguments)
            if not is_traced(new):
                pool.consume("forward_paged")
        return output, pool.with_words(new)

    def read_heads(
        self, pool: ShardedPool, layer: AnyLayer, slots: Any, heads: HeadPlan
    ) -> tuple[jax.Array, jax.Array]:
        """K and V at the slots of each data rank, each KV head of the model once.

        Where several ranks hold a head, the first is asked; padded heads are left out.

        Args:
            slots: ``[data * T]``; −1 gives zeros.
            heads: how the layer's heads are divided over the tensor axis.

        Returns:
            ``(key [data * T, Hkv, D], value [data * T, Hkv, Dv])`` in the stored type, with the
            model's KV heads in order.

        Raises:
            TensorError: ``heads`` is of other ranks, or of other heads than the layer has.
            BlockTableError: a slot out of range, in slots that lie on the host.
        """
        self._check_pool(pool)
        words, ranks = pool.words, self._ranks
        view, cell, address = place_of(pool, layer)
        slots = check_slots(view, slots)
        self._check_divides("slots", slots.shape[0])
        if (heads.ranks, heads.kv_heads_per_rank) != (ranks.tensor, view.num_kv_heads):
            raise TensorError(
                f"heads: layer {view.name!r} has {view.num_kv_heads} KV heads on each of "
                f"{ranks.tensor} ranks, got {heads.kv_heads_per_rank} on each of {heads.ranks}"
            )
        key, value = rank_programs.read_program(
            words, (ranks, Program(cell, self._toolkit.moves)), address, slots
        )
        places = places_of_heads(heads)
        return spread(key, places), spread(value, places)

    @property
    def _num_ranks(self) -> int:
        return self._ranks.data * self._ranks.tensor

    def _check_pool(self, pool: ShardedPool) -> None:
        if not isinstance(pool, ShardedPool) or pool.ranks != self._ranks:
            raise PoolError(f"pool: expected one on {self!r}, got {pool!r}")
        _ = pool.words  # raises where it was consumed

    def _check_divides(self, name: str, count: int) -> None:
        if count % self._ranks.data:
            raise TensorError(
                f"{name}: expected as many entries for each of {self._ranks.data} data ranks, "
                f"got {count} in all"
            )

    def _check_one_for_each(self, name: str, entries: Sequence[Any]) -> None:
        if len(entries) != self._ranks.data:
            raise RowError(
                f"{name}: expected one entry for each of {self._ranks.data} data ranks, got "
                f"{len(entries)}"
            )

    def _changed(
        self, pool: ShardedPool, by: str, pair: rank_programs.Pair, arguments: tuple[Any, ...]
    ) -> ShardedPool:
        words = pool.words
        if is_traced(words, *jax.tree.leaves(arguments[1:])):
            return pool.with_words(pair.function(words, *arguments))
        new = pair.program(words, *arguments)
        if not is_traced(new):
            pool.consume(by)
        return pool.with_words(new)

    def _to_devices(
        self, shape: BatchShape, steps: Sequence[StepPlan], tables: Sequence[BlockTables]
    ) -> ShardedBatch:
        parts = [host_arrays(step, shape.bound) for step in steps]
        joined = jax.tree.map(lambda *columns: np.concatenate(columns), *parts)
        arrays = jax.device_put(joined, self._ranks.sharding(self._ranks.rows))
        hosts = tuple(BatchHost(step, table) for step, table in zip(steps, tables, strict=True))
        return ShardedBatch(shape, self._ranks, arrays, hosts)
