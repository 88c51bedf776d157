"""Batches: everything a step needs on the device, as a pytree of static shapes.

Block tables, lengths, intervals and slots are leaves, so other lengths in the same shapes run
the same program. The host's side of a batch (rows, tables, version) is no part of the pytree:
it would make every step compile again. A batch rebuilt from its leaves therefore carries none.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from backends.jax_gpu.allocator import is_traced
from backends.jax_gpu.kernels.base import BatchArrays, BoundWork, KernelCase
from backends.jax_gpu.kernels.select import Toolkit, select_kernel
from backends.jax_gpu.paging import PlanTemplate, PoolPlan
from layout_core.errors import RowError
from layout_core.rows import BlockTables, Bucket, PagedAttentionRow
from layout_core.serving import check_fresh, check_num_heads
from layout_core.step import StepPlan, plan_step
from layout_core.views import ResolvedLayout
from layout_core.visibility import Spans, Visibility


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What is static in a batch beside the shapes of its arrays; programs are compiled for it."""

    plan: PoolPlan
    group: int
    num_heads: int  #: query heads
    bound: BoundWork  #: the kernel that runs, and what it chose


@dataclass(frozen=True, slots=True, eq=False)
class BatchHost:
    """The host's side: what the batch was prepared from, and when that was."""

    step: StepPlan
    tables: BlockTables


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, slots=True, eq=False)
class JaxBatch:
    """One step for the layers of one group with one visibility; padding is included."""

    shape: BatchShape
    arrays: BatchArrays
    host: BatchHost | None = None  #: None inside a program, and after a pytree operation

    @property
    def kernel(self) -> str:
        """The kernel that runs."""
        return self.shape.bound.kernel.name

    @property
    def resolved(self) -> ResolvedLayout:
        """The plan that the batch was prepared for."""
        return self.shape.plan.resolved

    @property
    def is_portable(self) -> bool:
        """Whether it goes with a portable pool."""
        return isinstance(self.shape.plan, PlanTemplate)

    def portable(self) -> JaxBatch:
        """The same step for a portable pool; see :meth:`JaxPool.portable`.

        It is checked here, once, that the step is not stale; the result knows no tables.

        Raises:
            StaleBatchError: the block tables have changed.
        """
        self.check_fresh()
        return JaxBatch(replace(self.shape, plan=self.shape.plan.template()), self.arrays)

    @property
    def group(self) -> int:
        """The group whose block table the batch holds."""
        return self.shape.group

    @property
    def num_tokens(self) -> int:
        """Queries of all rows, padding included."""
        return self.arrays.lo.shape[0]

    def check_fresh(self) -> None:
        """Raise if the block tables have changed since; nothing to compare inside a program.

        Raises:
            StaleBatchError: names both versions.
        """
        if self.host is not None and not is_traced(self.arrays.lo):
            check_fresh(self.host.step, self.host.tables.version)

    def tree_flatten(self) -> tuple[tuple[BatchArrays], BatchShape]:
        return (self.arrays,), self.shape

    @classmethod
    def tree_unflatten(cls, shape: BatchShape, leaves: tuple[Any]) -> JaxBatch:
        return cls(shape, leaves[0])


def make_batch(
    resolved: ResolvedLayout,
    rows: Sequence[PagedAttentionRow],
    tables: BlockTables,
    device: jax.Device,
    toolkit: Toolkit,
    *,
    visibility: Visibility,
    num_heads: int,
    group: int = 0,
    spans: Sequence[Spans | None] | None = None,
    kernel: str = "auto",
    bucket: Bucket | None = None,
    plan: PoolPlan | None = None,
) -> JaxBatch:
    """Check a step and move it to the device; see ``Engine.prepare``.

    Args:
        plan: the pool's, where it is at hand; else it is made from ``resolved``.
    """
    check_num_heads(resolved, group, num_heads)
    step = plan_step(
        resolved, rows, tables, visibility=visibility, group=group, spans=spans, bucket=bucket
    )
    plan = PoolPlan(resolved) if plan is None else plan
    bound = select_kernel(kernel, kernel_case(plan, step, num_heads, toolkit.platform), toolkit)
    shape = BatchShape(plan, group, num_heads, bound)
    return _to_device(shape, BatchHost(step, tables), device)


def kernel_case(plan: PoolPlan, step: StepPlan, num_heads: int, platform: str) -> KernelCase:
    """What a kernel must serve: a step's shapes, and the kinds of layers of its group."""
    layers = plan.resolved.group_layers(step.group)
    return KernelCase(
        platform=platform,
        num_heads=num_heads,
        cells=tuple(dict.fromkeys(plan.cells[index] for index in layers)),
        num_tokens=step.num_tokens,
        num_rows=step.num_rows,
        max_keys=step.max_blocks * step.block_size,
    )


def update_batch(
    batch: JaxBatch, rows: Sequence[PagedAttentionRow], tables: BlockTables, device: jax.Device
) -> JaxBatch:
    """A batch of the same shapes with new rows or block tables; see ``Engine.update``.

    Spans stay those of ``prepare``, one entry for each row.

    Raises:
        RowError: the batch has no host side, or the rows do not fit its shapes.
    """
    if batch.host is None:
        raise RowError(
            "batch: it was rebuilt from its leaves and carries no rows; update the batch that "
            "prepare returned, outside of jit"
        )
    step = batch.host.step
    if batch.host.tables is tables and step.matches(rows, tables.version):
        return batch
    return _to_device(batch.shape, BatchHost(replan(step, rows, tables), tables), device)


def replan(step: StepPlan, rows: Sequence[PagedAttentionRow], tables: BlockTables) -> StepPlan:
    """A step of the same shapes, rule and spans with other rows or tables.

    Raises:
        RowError: the rows do not fit the shapes.
    """
    new = plan_step(
        step.resolved,
        rows,
        tables,
        visibility=step.visibility,
        group=step.group,
        spans=step.spans,
        bucket=step.bucket,
    )
    check_same_shapes(step, new)
    return new


def check_same_shapes(old: StepPlan, new: StepPlan) -> None:
    """Raise unless a new step fits the arrays of an old one.

    Raises:
        RowError: names the count that differs.
    """
    for name in ("num_tokens", "num_rows", "max_blocks"):
        want, got = getattr(old, name), getattr(new, name)
        if want != got:
            raise RowError(
                f"rows: update keeps the shapes of the batch, which has {name} {want}; the new "
                f"rows need {got}. Give prepare a bucket to leave room"
            )


def _to_device(shape: BatchShape, host: BatchHost, device: jax.Device) -> JaxBatch:
    arrays = host_arrays(host.step, shape.bound)
    return JaxBatch(shape, BatchArrays(*jax.device_put(tuple(arrays), device)), host)


def host_arrays(step: StepPlan, bound: BoundWork) -> BatchArrays:
    """The data of a step as NumPy arrays."""
    lo, hi = _int32(step.lo), _int32(step.hi)
    row_lo, row_hi = _row_ranges(lo, hi, _int32(step.cu_seqlens))
    arrays: tuple[Any, ...] = (
        _int32(step.block_table).reshape(step.num_rows, step.max_blocks),
        _int32(step.cu_seqlens),
        row_lo,
        row_hi,
        lo,
        hi,
        np.frombuffer(step.slots, dtype=np.int64).astype(np.int32),
        bound.kernel.tables(bound.work, step),
    )
    return BatchArrays(*arrays)


Int32 = np.ndarray[Any, np.dtype[np.int32]]


def _int32(values: array[int]) -> Int32:
    return np.array(values, dtype=np.int32)


def _row_ranges(lo: Int32, hi: Int32, cu_seqlens: Int32) -> tuple[Int32, Int32]:
    """For each row the union of its queries' intervals; ``[0, 0)`` where none sees a key."""
    rows = len(cu_seqlens) - 1
    row_lo, row_hi = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    sees = hi > lo
    for row in range(rows):
        queries = slice(cu_seqlens[row], cu_seqlens[row + 1])
        mask = sees[queries]
        if mask.any():
            row_lo[row] = lo[queries][mask].min()
            row_hi[row] = hi[queries][mask].max()
    return row_lo, row_hi
