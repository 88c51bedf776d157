"""The frozen plan that engines execute: where each layer's cells lie, in bytes.

``resolve_layout`` (in :mod:`layout_core.resolve`) makes it; this module only says what it is.
Every number an engine addresses by stands here, so no engine derives a stride of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import gcd
from typing import NamedTuple

from layout_core.dtypes import DType
from layout_core.errors import LayoutError
from layout_core.layouts import KVCacheLayout
from layout_core.specs import KVCacheSpec


class BlockGranularity(StrEnum):
    """In which blocks a view counts along its B axis."""

    MANAGER = "manager"  #: the blocks that the scheduler hands out
    KERNEL = "kernel"  #: equal pieces of a manager block


class ByteRange(NamedTuple):
    """A half-open range of bytes ``[start, stop)`` of the allocation."""

    start: int
    stop: int


@dataclass(frozen=True)
class LayerView:
    """One layer's K/V as a strided view ``[B, H, N, C]`` of the allocation.

    Cell ``(b, h, n)`` is the ``C`` bytes from ``offset + b*strides[0] + h*strides[1] +
    n*strides[2]``: ``head_size`` elements of K, then ``head_size_v`` of V (``K ‖ V``).
    """

    name: str  #: the layer's name in the config
    group: int  #: index of the KV cache group whose block table it uses
    offset: int  #: byte of cell (0, 0, 0)
    shape: tuple[int, int, int, int]  #: (B, H, N, C); C in bytes
    strides: tuple[int, int, int, int]  #: bytes, [B, H, N, C]; the last is 1
    dtype: DType
    num_kv_heads: int
    head_size: int  #: elements of K in a cell
    head_size_v: int  #: elements of V in a cell
    block_size: int  #: tokens of one block of this view (see ``granularity``)
    granularity: BlockGranularity = BlockGranularity.MANAGER
    blocks_per_manager_block: int = 1  #: 1 unless ``granularity`` is ``KERNEL``

    def at(self, name: str, offset: int) -> LayerView:
        """The same view for another layer, at another byte.

        A copy of the fields: a plan makes one for each layer, and the constructor of a frozen
        dataclass takes three times as long.
        """
        view = object.__new__(LayerView)
        view.__dict__.update(self.__dict__)
        view.__dict__["name"] = name
        view.__dict__["offset"] = offset
        return view

    @property
    def byte_range(self) -> ByteRange:
        """Half-open and exact: no index reaches a byte outside, and both ends are reached."""
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        return ByteRange(self.offset, self.offset + reach + 1)

    @property
    def key_bytes(self) -> int:
        """Bytes of K at the start of a cell; V follows at once."""
        return self.head_size * self.dtype.bits // 8

    @property
    def value_bytes(self) -> int:
        """Bytes of V in a cell, after K."""
        return self.head_size_v * self.dtype.bits // 8

    def cell_offset(self, block: int, head: int, token: int) -> int:
        """First byte of cell ``(block, head, token)``, each counted in this view's axes."""
        for axis, index, size in zip("BHN", (block, head, token), self.shape):
            if not 0 <= index < size:
                raise LayoutError(
                    f"layer {self.name!r}: index {index} on axis {axis} is outside [0, {size})"
                )
        b, h, n, _ = self.strides
        return self.offset + block * b + head * h + token * n

    def max_block_for_index_bits(self, bits: int = 32) -> int:
        """Largest block id whose every element has a signed ``bits``-bit element offset.

        Offsets count elements of ``dtype`` from the start of the allocation, as a kernel that
        indexes a typed pointer does. −1 when not even block 0 can be addressed.
        """
        limit_bytes = (1 << (bits - 1)) * self.dtype.bits // 8  # first byte out of reach
        inside_block = sum((s - 1) * t for s, t in zip(self.shape[1:], self.strides[1:]))
        room = limit_bytes - 1 - self.offset - inside_block
        if room < 0:
            return -1
        return min(self.shape[0] - 1, room // self.strides[0])


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A KV cache group as resolved: layers that share one block table."""

    layer_names: tuple[str, ...]
    block_size: int  #: tokens of a manager block
    specs: tuple[KVCacheSpec, ...]  #: one for each layer, in the order of ``layer_names``


@dataclass(frozen=True, slots=True)
class ResolvedLayout:
    """One layout, one allocation, one view for each layer: what both engines execute."""

    layout: KVCacheLayout
    size_bytes: int  #: the whole allocation
    num_blocks: int  #: manager blocks, the null block included
    layers: tuple[LayerView, ...]  #: in the order of the groups, then of their layers
    groups: tuple[GroupPlan, ...]
    null_block: bool = True  #: block 0 is held back and never written
    _index: dict[str, int] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", {v.name: i for i, v in enumerate(self.layers)})

    def __reduce__(self) -> tuple[object, ...]:
        return (
            ResolvedLayout,
            (
                self.layout,
                self.size_bytes,
                self.num_blocks,
                self.layers,
                self.groups,
                self.null_block,
            ),
        )

    def layer_index(self, layer: int | str) -> int:
        """Index into ``layers`` of a layer given by index or by name; unknown ones raise."""
        if isinstance(layer, str):
            if layer in self._index:
                return self._index[layer]
            raise LayoutError(f"layer: {layer!r} is not in this plan; it has {list(self._index)}")
        if isinstance(layer, int) and 0 <= layer < len(self.layers):
            return layer
        raise LayoutError(f"layer: expected an index in [0, {len(self.layers)}), got {layer!r}")

    def layer(self, layer: int | str) -> LayerView:
        """The view of a layer given by index or by name."""
        return self.layers[self.layer_index(layer)]

    def group_layers(self, group: int) -> tuple[int, ...]:
        """Indices into ``layers`` of one group's layers."""
        self.group(group)
        return tuple(i for i, view in enumerate(self.layers) if view.group == group)

    def group(self, group: int) -> GroupPlan:
        """A group by index; one out of range raises."""
        if not 0 <= group < len(self.groups):
            raise LayoutError(f"group: expected an index in [0, {len(self.groups)}), got {group}")
        return self.groups[group]


@dataclass(frozen=True, slots=True)
class RowView:
    """A layer's strides counted in rows of a :class:`RowGeometry`."""

    offset: int
    block_stride: int
    head_stride: int
    token_stride: int
    rows_per_cell: int


@dataclass(frozen=True, slots=True)
class RowGeometry:
    """The allocation as a matrix ``[num_rows, words_per_row]`` of unsigned words.

    For an engine without strided views: cell ``(b, h, n)`` of a layer is the
    ``rows_per_cell`` rows from ``offset + b*block_stride + h*head_stride + n*token_stride``.
    """

    row_bytes: int  #: greatest common divisor of all strides, offsets and content sizes
    word_bits: int  #: 8, 16 or 32: the narrowest element among the layers, and it divides a row
    num_rows: int
    layers: tuple[RowView, ...]

    @property
    def words_per_row(self) -> int:
        return self.row_bytes * 8 // self.word_bits


def row_geometry(resolved: ResolvedLayout) -> RowGeometry:
    """Rows, words and strides in rows for an engine that addresses rows of a flat pool.

    The row is the greatest common divisor of every stride, offset and content size, so that
    each cell is a whole number of rows in every layout. A stride along an axis of size 1 is
    never followed and does not narrow the row.
    """
    row_bytes = 0
    for view in resolved.layers:
        row_bytes = gcd(row_bytes, view.offset, view.shape[3])
        for size, stride in zip(view.shape[:3], view.strides[:3]):
            if size > 1:
                row_bytes = gcd(row_bytes, stride)
    if row_bytes == 0:
        raise LayoutError("resolved: the plan has no layers, so it has no row geometry")
    row_bytes = gcd(row_bytes, resolved.size_bytes)
    word_bits = min(min(max(8, view.dtype.bits) for view in resolved.layers), 32)
    while row_bytes * 8 % word_bits:
        word_bits //= 2
    layers = tuple(
        RowView(
            offset=view.offset // row_bytes,
            # strides of unit axes may not divide; they multiply an index that is always 0
            block_stride=view.strides[0] // row_bytes,
            head_stride=view.strides[1] // row_bytes,
            token_stride=view.strides[2] // row_bytes,
            rows_per_cell=view.shape[3] // row_bytes,
        )
        for view in resolved.layers
    )
    return RowGeometry(row_bytes, word_bits, resolved.size_bytes // row_bytes, layers)
