"""Why a kernel is taken for a shape: for a person who asks, on a machine with a GPU or without."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

import torch

from backends.torch_cuda.device import resolve_device
from backends.torch_cuda.kernels.base import Chip
from backends.torch_cuda.kernels.select import AUTO, explain, select_kernel, toolkit_for
from backends.torch_cuda.paged import kernel_case
from layout_core.dtypes import DType
from layout_core.layouts import KVCacheLayout
from layout_core.resolve import resolve_layout, single_group_config
from layout_core.rows import Bucket, PagedAttentionRow
from layout_core.specs import FullAttentionSpec
from layout_core.visibility import Visibility

ASSUMED_CHIP: Final = Chip(capability=(9, 0), num_sms=132)
"""What a CUDA device is taken for where there is none: an H200."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A step to explain the choice for: equal rows."""

    dtype: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    block_size: int
    layout: KVCacheLayout
    rows: int
    queries: int  #: of each row; the last of its keys
    keys: int  #: of each row
    causal: bool
    bucket: bool  #: whether the step is padded, so that it can be captured in a CUDA graph


@dataclass(frozen=True, slots=True)
class Choice:
    """What ``kernel="auto"`` does."""

    device: str
    assumed: Chip | None  #: what a device that is not there was taken for
    kernel: str
    kernels: tuple[tuple[str, str | None], ...]  #: each, and why it is not taken
    notes: tuple[str, ...]  #: what the layout or dtype costs, in sentences


class _Tables:
    version = 0

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks

    def block_ids(self, row: PagedAttentionRow, group: int) -> array[int]:
        first = 1 + (row.sequence_id or 0) * self._blocks
        return array("i", range(first, first + self._blocks))


def explain_choice(shape: Shape, device: str | None = None) -> Choice:
    """The kernel that serves a shape, and why not the others. Nothing is allocated.

    Args:
        shape: the step.
        device: ``cpu``, ``cuda`` or ``cuda:N``; a CUDA device that is not there is taken for
            :data:`ASSUMED_CHIP`, and the answer says so.

    Raises:
        DeviceError: no device of torch_cuda.
        MissingPackageError: a CUDA device, and Triton is not installed.
        LayoutError: a shape that contradicts itself, or that no kernel serves.
    """
    absent = (device or "").startswith("cuda") and not torch.cuda.is_available()
    where = torch.device("cuda", 0) if absent else resolve_device(device)
    chip = ASSUMED_CHIP if absent else None
    toolkit = toolkit_for(where, chip)
    blocks = -(-shape.keys // shape.block_size)
    spec = FullAttentionSpec(
        block_size=shape.block_size,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        head_size_v=shape.head_size_v,
        dtype=DType.parse(shape.dtype),
    )
    config = single_group_config(spec, 1 + shape.rows * blocks, ["layer"], shape.layout)
    bucket = Bucket(shape.rows * shape.queries, shape.rows, blocks) if shape.bucket else None
    case = kernel_case(
        resolve_layout(config),
        [
            PagedAttentionRow(
                "request", shape.queries, shape.keys, shape.keys - shape.queries, sequence_id=i
            )
            for i in range(shape.rows)
        ],
        _Tables(blocks),
        visibility=Visibility(causal=shape.causal),
        num_heads=shape.num_heads,
        device=where,
        bucket=bucket,
    )
    kernel = select_kernel(AUTO, case, toolkit)
    return Choice(
        device=str(where),
        assumed=chip,
        kernel=kernel.name,
        kernels=tuple(explain(case, toolkit)),
        notes=kernel.notes(case),
    )
