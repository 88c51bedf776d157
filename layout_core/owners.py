"""Who owns a byte of the allocation: the inverse of :meth:`LayerView.cell_offset`.

Every number comes from the views of a plan, so what is said here is what engines address.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from layout_core.errors import LayoutError
from layout_core.rows import NULL_BLOCK_ID
from layout_core.views import LayerView, ResolvedLayout


class CellIndex(NamedTuple):
    """A cell of one view, counted in the view's own axes, and its first byte."""

    block: int
    head: int
    token: int
    start: int


@dataclass(frozen=True, slots=True)
class OwnedByte:
    """One cell that holds a byte, and the byte's place in it."""

    layer: int  #: index into the plan's layers
    name: str
    group: int
    block: int  #: manager block
    kernel_block: int  #: the view's block; equal to ``block`` unless blocks are split
    head: int
    token: int  #: of the view's block
    start: int  #: first byte of the cell
    size: int  #: bytes of the cell
    offset: int  #: of the byte in the cell
    part: str  #: ``"K"`` or ``"V"``; ``"content"`` where the cell is packed otherwise
    element: int  #: index in K or in V; −1 for packed content
    null: bool  #: the cell belongs to the null block, which is never written


@dataclass(frozen=True, slots=True)
class ByteOwners:
    """All that is to be said about one byte.

    Several owners are cells of groups that overlay each other: one block id, which belongs to
    one group at a time. No owner means padding.
    """

    byte: int
    owners: tuple[OwnedByte, ...]  #: at most one for each group, in the order of the groups
    before: tuple[OwnedByte, ...]  #: for each group, the last cell that ends at or before the byte
    distance: int | None  #: bytes to the next cell of any group; ``None`` past the last one

    @property
    def is_padding(self) -> bool:
        return not self.owners


def nested_axes(view: LayerView) -> list[tuple[str, int, int]]:
    """``(axis, size, stride)`` of the axes B, H, N longer than 1, outermost in memory first."""
    axes = [axis for axis in zip("BHN", view.shape, view.strides) if axis[1] > 1]
    axes.sort(key=_stride, reverse=True)
    return axes


def _stride(axis: tuple[str, int, int]) -> int:
    return axis[2]


def last_cell_from(view: LayerView, byte: int) -> CellIndex | None:
    """The last cell in memory that starts at or before ``byte``; ``None`` before the first.

    Each axis steps over everything that the axes inside it reach, so one division for each
    axis, from the outermost on, finds it.
    """
    rest = byte - view.offset
    if rest < 0:
        return None
    found = {"B": 0, "H": 0, "N": 0}
    for axis, size, stride in nested_axes(view):
        found[axis] = min(size - 1, rest // stride)
        rest -= found[axis] * stride
    return CellIndex(found["B"], found["H"], found["N"], byte - rest)


def first_cell_after(view: LayerView, byte: int) -> CellIndex | None:
    """The first cell in memory that starts after ``byte``; ``None`` past the last."""
    here = last_cell_from(view, byte)
    if here is None:
        return CellIndex(0, 0, 0, view.offset)
    index = {"B": here.block, "H": here.head, "N": here.token}
    start = here.start
    for axis, size, stride in reversed(nested_axes(view)):
        if index[axis] + 1 < size:
            index[axis] += 1
            return CellIndex(index["B"], index["H"], index["N"], start + stride)
        start -= index[axis] * stride
        index[axis] = 0
    return None


def holds_cell(view: LayerView, start: int, stop: int) -> bool:
    """Whether any cell of a view has a byte in ``[start, stop)``."""
    if stop <= start:
        return False
    last = last_cell_from(view, stop - 1)
    return last is not None and last.start + view.shape[3] > start


def _owned(resolved: ResolvedLayout, layer: int, cell: CellIndex, byte: int) -> OwnedByte:
    view = resolved.layers[layer]
    offset = byte - cell.start
    part, element = "content", -1
    if view.key_bytes + view.value_bytes == view.shape[3]:
        inside = offset - view.key_bytes
        part = "K" if inside < 0 else "V"
        element = (offset if inside < 0 else inside) * 8 // view.dtype.bits
    block = cell.block // view.blocks_per_manager_block
    return OwnedByte(
        layer=layer,
        name=view.name,
        group=view.group,
        block=block,
        kernel_block=cell.block,
        head=cell.head,
        token=cell.token,
        start=cell.start,
        size=view.shape[3],
        offset=offset,
        part=part,
        element=element,
        null=resolved.null_block and block == NULL_BLOCK_ID,
    )


def _candidates(resolved: ResolvedLayout, byte: int) -> Iterator[tuple[int, CellIndex]]:
    for index, view in enumerate(resolved.layers):
        cell = last_cell_from(view, byte)
        if cell is not None:
            yield index, cell


def owners_of_byte(resolved: ResolvedLayout, byte: int) -> ByteOwners:
    """The cells that hold a byte of the allocation, or what lies around a byte of padding.

    Args:
        resolved: the plan.
        byte: counted from the start of the allocation.

    Raises:
        LayoutError: ``byte`` lies outside ``[0, size_bytes)``.
    """
    if type(byte) is not int or not 0 <= byte < resolved.size_bytes:
        shown = f"{byte:#x}" if type(byte) is int and byte >= 0 else repr(byte)
        raise LayoutError(
            f"byte: expected an int in [0, {resolved.size_bytes:#x}), the {resolved.size_bytes:,} "
            f"bytes of the allocation, got {shown}"
        )
    owners: dict[int, OwnedByte] = {}
    before: dict[int, OwnedByte] = {}
    for layer, cell in _candidates(resolved, byte):
        view = resolved.layers[layer]
        if byte < cell.start + view.shape[3]:
            owners[view.group] = _owned(resolved, layer, cell, byte)
            continue
        known = before.get(view.group)
        if known is None or known.start < cell.start:
            before[view.group] = _owned(resolved, layer, cell, byte)
    later = [first_cell_after(view, byte) for view in resolved.layers]
    starts = [cell.start for cell in later if cell is not None]
    return ByteOwners(
        byte,
        tuple(owners[g] for g in sorted(owners)),
        tuple(before[g] for g in sorted(before)),
        min(starts) - byte if starts else None,
    )
