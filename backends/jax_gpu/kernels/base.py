"""What a kernel is to the engine: a refusal, a plan for each shape of step, and the calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from backends.jax_gpu.paging import Address, CellShape
from layout_core.step import StepPlan

Scalars = tuple[Any, Any, Any]
"""What multiplies the scores, what multiplies the output, and the softcap or ``None``."""

Tables = tuple[np.ndarray[Any, np.dtype[np.int32]], ...]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """What a kernel must serve: the layers of one group, and the shapes of a batch."""

    platform: str  #: as JAX names it
    num_heads: int  #: query heads
    cells: tuple[CellShape, ...]  #: of the layers, each kind once
    num_tokens: int
    num_rows: int
    max_keys: int  #: that a row's table has room for


class BatchArrays(NamedTuple):
    """The data of a batch: ``T`` tokens, ``R`` rows, ``M`` table entries a row; all int32."""

    block_table: jax.Array  #: [R, M], blocks as the layers' views count them
    cu_seqlens: jax.Array  #: [R + 1], first query of each row
    row_lo: jax.Array  #: [R], first key that a query of the row sees
    row_hi: jax.Array  #: [R], end of the keys that queries of the row see
    lo: jax.Array  #: [T]
    hi: jax.Array  #: [T]
    slots: jax.Array  #: [T], −1 where nothing is written
    tables: tuple[jax.Array, ...] = ()  #: what the kernel made of them on the host


class Kernel(Protocol):
    """A way to attend over pages and to move cells. Programs are compiled for it, so a kernel is
    hashable, and equal to another that compiles the same.
    """

    @property
    def name(self) -> str:
        """The name that ``kernel=`` takes."""
        ...

    def refuse(self, case: KernelCase) -> str | None:
        """Why the kernel cannot serve a case; ``None`` where it can."""
        ...

    def plan(self, case: KernelCase) -> Any:
        """What is chosen for these shapes: static, hashable, and the same for other rows."""
        ...

    def tables(self, work: Any, step: StepPlan) -> Tables:
        """Data for a step beside its arrays, in shapes that follow from ``work``."""
        ...

    def attend(
        self,
        words: jax.Array,
        cell: CellShape,
        address: Address,
        query: jax.Array,
        arrays: BatchArrays,
        scalars: Scalars,
        work: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """Attention of packed rows over their pages.

        Returns:
            ``(output [T, Hq, Dv]`` in the query's dtype, ``lse [T, Hq]`` in float32``)``. A query
            that sees no key gives zeros and −inf.
        """
        ...

    def write(
        self,
        words: jax.Array,
        cell: CellShape,
        address: Address,
        key: jax.Array,
        value: jax.Array,
        slots: jax.Array,
    ) -> jax.Array:
        """See :func:`backends.jax_gpu.paging.write_cells`."""
        ...

    def copy(
        self,
        words: jax.Array,
        cell: CellShape,
        address: Address,
        source: jax.Array,
        target: jax.Array,
    ) -> jax.Array:
        """See :func:`backends.jax_gpu.paging.copy_cells`."""
        ...


class Program(NamedTuple):
    """What a program of one layer is compiled for, beside the shapes of its arrays."""

    cell: CellShape
    kernel: Kernel
    work: Any = None  #: of ``Kernel.plan``; not for moves


class BoundWork(NamedTuple):
    """A kernel and what it chose for a batch."""

    kernel: Kernel
    work: Any
