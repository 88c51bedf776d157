"""Proof, without looking at single bytes, that the cells of a group lie apart and inside.

Walking a tensor's axes outwards, in the layout's order, each stride must step over everything
that the axes inside it reach. That suffices for any strides, and is exact for those that the
layouts derive; brute force over bytes confirms it in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from layout_core.errors import ConfigError, OverlapError
from layout_core.layouts import DIM_B, KVCacheLayout
from layout_core.strides import Shape4, Strides5
from layout_core.tensors import KVCacheTensor

_AXES = "LBHNC"


@dataclass(frozen=True, slots=True)
class Extent:
    """What one tensor's cells reach, in bytes of the allocation."""

    where: str
    offset: int
    in_block: int  #: bytes from block 0's first to its last, all layers; B outermost only
    total: int  #: bytes from the first to the last
    block_stride: int


def check_cells(
    layout: KVCacheLayout, shape: Shape4, strides: Strides5, tensor: KVCacheTensor, where: str
) -> Extent:
    """Raise unless the cells of one tensor are disjoint and inside the allocation.

    Args:
        layout: the order of the axes.
        shape: ``[B, H, N, C]`` of each layer.
        strides: bytes, ``[L, B, H, N, C]``.
        tensor: the placement; ``shape`` and ``strides`` may count kernel blocks.
        where: group and layer, for messages.

    Raises:
        OverlapError: two cells share a byte, or one lies outside.
        ConfigError: an axis of size 0.
    """
    sizes = (len(tensor.layers), *shape)
    reach = inside = 0  # last byte that the axes walked so far reach, from the first
    for axis in reversed(layout.stride_order):
        size, stride = sizes[axis], strides[axis]
        if size < 1:
            raise ConfigError(f"{where}: axis {_AXES[axis]} has size {size}")
        if axis == DIM_B:
            inside = reach
        if size > 1:
            if stride <= reach:
                raise OverlapError(
                    f"{where}: cells share bytes: axis {_AXES[axis]} steps {stride} bytes and the "
                    f"axes inside it reach {reach + 1}"
                )
            reach += (size - 1) * stride
    if tensor.offset < 0 or tensor.offset + reach >= tensor.size:
        raise OverlapError(
            f"{where}: cells lie in bytes [{tensor.offset}, {tensor.offset + reach + 1}), outside "
            f"the allocation of {tensor.size} bytes"
        )
    return Extent(where, tensor.offset, inside + 1, reach + 1, tensor.block_stride)


def check_tensors_apart(layout: KVCacheLayout, extents: Sequence[Extent]) -> None:
    """Raise unless the tensors of one group lie apart.

    With B outermost they share each block, side by side; else each has a region of its own.

    Raises:
        OverlapError: names both.
    """
    if len(extents) < 2:
        return
    shared = layout.is_block_outermost
    ordered = sorted(extents, key=lambda extent: extent.offset)
    for first, second in pairwise(ordered):
        end = first.offset + (first.in_block if shared else first.total)
        if end > second.offset:
            raise OverlapError(
                f"{second.where}: starts at byte {second.offset}, and {first.where} reaches byte "
                f"{end - 1}{' of each block' if shared else ''}"
            )
    last = ordered[-1]
    if shared and last.offset + last.in_block > ordered[0].offset + last.block_stride:
        raise OverlapError(
            f"{last.where}: reaches byte {last.offset + last.in_block - 1} of a block, past the "
            f"block stride of {last.block_stride}"
        )
