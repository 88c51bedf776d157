"""Kernel ``xla``: plain XLA operations, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from backends.jax_gpu.kernels import xla
from backends.jax_gpu.kernels.base import BatchArrays, KernelCase, Scalars, Tables
from backends.jax_gpu.paging import Address, CellShape, copy_cells, write_cells
from layout_core.step import StepPlan


@dataclass(frozen=True, slots=True)
class XlaKernel:
    """Serves every case."""

    @property
    def name(self) -> str:
        return "xla"

    def refuse(self, case: KernelCase) -> str | None:
        return None

    def plan(self, case: KernelCase) -> None:
        return None

    def tables(self, work: None, step: StepPlan) -> Tables:
        return ()

    def attend(
        self,
        words: jax.Array,
        cell: CellShape,
        address: Address,
        query: jax.Array,
        arrays: BatchArrays,
        scalars: Scalars,
        work: None,
    ) -> tuple[jax.Array, jax.Array]:
        score_scale, value_scale, softcap = scalars
        return xla.paged_attention(
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

    def write(
        self,
        words: jax.Array,
        cell: CellShape,
        address: Address,
        key: jax.Array,
        value: jax.Array,
        slots: jax.Array,
    ) -> jax.Array:
        return write_cells(words, cell, address, key, value, slots)

    def copy(
        self,
        words: jax.Array,
        cell: CellShape,
        address: Address,
        source: jax.Array,
        target: jax.Array,
    ) -> jax.Array:
        return copy_cells(words, cell, address, source, target)
