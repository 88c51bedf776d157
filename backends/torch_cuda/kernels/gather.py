"""Kernel ``gather``: pages copied to contiguous K/V by one launch, then torch's attention.

The same calls as kernel ``sdpa``, over the same segments; only the keys come otherwise: one kernel
reads the block tables for all rows, where ``sdpa`` selects by an index of every cell. K and V are
then each contiguous, heads before tokens, as torch's fused kernels for GPUs like them best.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from backends.torch_cuda.allocator import LayerTensors
from backends.torch_cuda.kernels.base import KernelCase
from backends.torch_cuda.kernels.sdpa import Gatherer, RowWork, SdpaKernel, SdpaWork
from backends.torch_cuda.kernels.triton import start, words_of
from backends.torch_cuda.paging import PageGeometry
from backends.torch_cuda.staging import Staging
from backends.triton_kernels.plans import plan_gather


@dataclass(frozen=True, slots=True, eq=False)
class GatherTables:
    """What the launch reads, one entry for each gathered row in the order of the work."""

    block_table: torch.Tensor  #: int32 [R, M]
    first_key: torch.Tensor  #: int32 [R]
    cu_keys: torch.Tensor  #: int32 [R + 1]
    max_keys: int
    total_keys: int
    starts: dict[int, int]  #: row of the step -> where its keys start


class GatherKernel(SdpaKernel):
    """See the module.

    Args:
        device_type: where it runs. Tests name ``cpu``, where Triton's interpreter runs it.
    """

    name = "gather"

    def __init__(self, device_type: str = "cuda") -> None:
        self._device_type = device_type

    def refuse(self, case: KernelCase) -> str | None:
        if case.device.type != self._device_type:
            return f"it runs on {self._device_type} devices, not on {case.device}"
        return super().refuse(case)

    def _selected(self, geometries: Mapping[PageGeometry, int]) -> Mapping[PageGeometry, int]:
        return {}

    def _tables(self, case: KernelCase, rows: Sequence[RowWork]) -> GatherTables:
        step = case.step
        table, firsts, bounds = array("i"), array("i"), array("i", [0])
        starts: dict[int, int] = {}
        for work in rows:
            for index, first in zip(work.indices, work.firsts, strict=True):
                table.extend(
                    step.block_table[index * step.max_blocks : (index + 1) * step.max_blocks]
                )
                firsts.append(first)
                starts[index] = bounds[-1]
                bounds.append(bounds[-1] + work.keys)
        values = {
            "block_table": (table, (len(firsts), step.max_blocks)),
            "first_key": (firsts, (len(firsts),)),
            "cu_keys": (bounds, (len(bounds),)),
        }
        staging = Staging({name: ("i", shape) for name, (_, shape) in values.items()}, case.device)
        staging.fill(values)
        return GatherTables(
            **staging.tables,
            max_keys=max((work.keys for work in rows), default=0),
            total_keys=bounds[-1],
            starts=starts,
        )

    def _gatherer(
        self, layer: LayerTensors, work: SdpaWork, geometry: int, dtype: torch.dtype
    ) -> Gatherer:
        tables: GatherTables = work.tables
        view = layer.view
        key, value = (
            torch.empty(
                (view.num_kv_heads, tables.total_keys, size),
                dtype=layer.key.dtype,
                device=layer.key.device,
            )
            for size in (view.head_size, view.head_size_v)
        )
        word, words = words_of(layer)
        launch = plan_gather(
            num_rows=tables.first_key.shape[0],
            max_keys=tables.max_keys,
            table_width=tables.block_table.shape[1],
            total_keys=tables.total_keys,
            kv_heads=view.num_kv_heads,
            head_size=view.head_size * words,
            head_size_v=view.head_size_v * words,
            block_size=view.block_size,
            dtype=word,
            unit=layer.unit * words,
            head_major=True,
        )
        start(
            launch,
            {
                "pool": layer.storage,
                "place": layer.place,
                "block_table": tables.block_table,
                "first_key": tables.first_key,
                "cu_keys": tables.cu_keys,
                "key_out": key,
                "value_out": value,
            },
        )

        def gather(row: RowWork) -> tuple[torch.Tensor, torch.Tensor]:
            first = tables.starts[row.indices[0]]
            shape = (view.num_kv_heads, len(row.indices), row.keys)
            parts = (
                x[:, first : first + shape[1] * shape[2]].view(*shape, -1).transpose(0, 1)
                for x in (key, value)
            )
            # 8-bit floats, which every dtype of a query holds exactly
            k, v = (x if x.dtype == dtype else x.to(dtype) for x in parts)
            return k, v

        return gather
