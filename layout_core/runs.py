"""How many contiguous runs of bytes a part of the cache makes: what a copy of it costs.

One block over all layers is one run in some layouts and ``L·H`` in others. The counts come
from the views of a plan, without a visit to every cell, so they are as quick for a million
blocks as for four; the tests compare them with sets of bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from layout_core.errors import LayoutError
from layout_core.owners import holds_cell
from layout_core.views import ByteRange, LayerView, ResolvedLayout

Heads = range | Sequence[range] | None
"""Head slots: one range for every layer, one for each layer, or ``None`` for all."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Contiguous runs of bytes, in ascending order of address."""

    start: int  #: first byte of the first run
    stop: int  #: past the last byte of the last run
    lengths: tuple[tuple[int, int], ...]  #: (bytes of a run, how many such runs), ascending
    payload_bytes: int  #: bytes of cells

    @property
    def count(self) -> int:
        return sum(times for _, times in self.lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs, padding inside them included."""
        return sum(length * times for length, times in self.lengths)

    @property
    def padding_bytes(self) -> int:
        """Bytes inside the runs that no chosen cell holds."""
        return self.num_bytes - self.payload_bytes

    @property
    def shortest(self) -> int:
        return self.lengths[0][0]

    @property
    def longest(self) -> int:
        return self.lengths[-1][0]


@dataclass(frozen=True, slots=True)
class PaddingBytes:
    """Bytes of an allocation that hold no K/V, with all blocks in use."""

    size_bytes: int  #: the whole allocation
    unused: int  #: bytes that no cell of any group holds
    by_group: tuple[int, ...]  #: bytes without a cell while every block belongs to the group


def count_runs(
    resolved: ResolvedLayout,
    *,
    layers: Sequence[int],
    blocks: range,
    heads: Heads = None,
    tokens: range | None = None,
    carry_padding: bool = True,
) -> Runs:
    """The runs that the chosen cells make: some tokens of some heads, blocks and layers.

    Args:
        resolved: the plan.
        layers: distinct indices into its layers, all of one group (a block belongs to one).
        blocks: manager blocks, ascending; ``range(1, 9, 2)`` is four that do not touch.
        heads: head slots.
        tokens: of the views' blocks; ``None`` for all.
        carry_padding: a run goes on over bytes that hold no cell of the group, as a copy that
            takes the padding along. ``False``: a run ends where the cells do.

    Raises:
        LayoutError: a choice that is empty or out of range, naming the argument.
    """
    boxes = _boxes(resolved, layers, blocks, heads, tokens)
    payload = sum(box.num_bytes for box in boxes)
    views = [view for view in resolved.layers if view.group == boxes[0].view.group]
    part = _fold(boxes, _carrying(views) if carry_padding else _touching)
    return Runs(part.start, part.stop, tuple(sorted(part.lengths.items())), payload)


def run_ranges(
    resolved: ResolvedLayout,
    *,
    layers: Sequence[int],
    blocks: range,
    heads: Heads = None,
    tokens: range | None = None,
    carry_padding: bool = False,
) -> list[ByteRange]:
    """The runs themselves, ascending: one object for each, so ask for a block or a few.

    Args and errors: see :func:`count_runs`; here padding ends a run unless it is carried.
    """
    boxes = _boxes(resolved, layers, blocks, heads, tokens)
    pieces = _merged([r for box in boxes for r in box.ranges()])
    if not carry_padding:
        return pieces
    joins = _carrying([view for view in resolved.layers if view.group == boxes[0].view.group])
    out = pieces[:1]
    for piece in pieces[1:]:
        if joins(out[-1].stop, piece.start):
            out[-1] = ByteRange(out[-1].start, piece.stop)
        else:
            out.append(piece)
    return out


def padding_of(resolved: ResolvedLayout) -> PaddingBytes:
    """Bytes of the allocation that hold nothing.

    Cells of unlike block ids never share a byte, so what one block of every group leaves free
    is left free by each.

    Raises:
        LayoutError: a plan without layers.
    """
    if not resolved.layers:
        raise LayoutError("resolved: the plan has no layers, so nothing in it is padding")
    held: list[ByteRange] = []
    by_group = []
    for group in range(len(resolved.groups)):
        layers = resolved.group_layers(group)
        ranges = run_ranges(resolved, layers=layers, blocks=range(1)) if layers else []
        used = sum(r.stop - r.start for r in ranges) * resolved.num_blocks
        by_group.append(resolved.size_bytes - used)
        held += ranges
    used = sum(r.stop - r.start for r in _merged(held)) * resolved.num_blocks
    return PaddingBytes(resolved.size_bytes, resolved.size_bytes - used, tuple(by_group))


@dataclass(frozen=True, slots=True)
class _Box:
    """Pieces of one length at equal steps along nested axes."""

    view: LayerView
    start: int
    axes: tuple[tuple[int, int], ...]  #: (count > 1, stride), outermost in memory first
    length: int

    @property
    def stop(self) -> int:
        return self.start + sum((count - 1) * stride for count, stride in self.axes) + self.length

    @property
    def num_bytes(self) -> int:
        total = self.length
        for count, _ in self.axes:
            total *= count
        return total

    def inner(self) -> _Box:
        """The first of the pieces along the outermost axis."""
        return _Box(self.view, self.start, self.axes[1:], self.length)

    def ranges(self) -> list[ByteRange]:
        starts = [self.start]
        for count, stride in self.axes:
            starts = [start + i * stride for start in starts for i in range(count)]
        return [ByteRange(start, start + self.length) for start in starts]


def _boxes(
    resolved: ResolvedLayout,
    layers: Sequence[int],
    blocks: range,
    heads: Heads,
    tokens: range | None,
) -> list[_Box]:
    if not layers or len(set(layers)) != len(layers):
        raise LayoutError(f"layers: expected distinct indices, at least one, got {list(layers)}")
    views = [resolved.layer(layer) for layer in layers]
    groups = sorted({view.group for view in views})
    if len(groups) > 1:
        raise LayoutError(
            f"layers: expected layers of one group, as a block belongs to one group at a time, "
            f"got groups {groups}"
        )
    _check_range("blocks", blocks, resolved.num_blocks)
    if heads is None or isinstance(heads, range):
        chosen = [range(view.shape[1]) if heads is None else heads for view in views]
    else:
        chosen = list(heads)
        if len(chosen) != len(views):
            raise LayoutError(
                f"heads: expected one range for each of {len(views)} layers, got {len(chosen)}"
            )
    for view, slots in zip(views, chosen):
        _check_range(f"heads of layer {view.name!r}", slots, view.shape[1])
        if tokens is not None:
            _check_range(f"tokens of layer {view.name!r}", tokens, view.shape[2])
    return [
        _box(view, blocks, slots, range(view.shape[2]) if tokens is None else tokens)
        for view, slots in zip(views, chosen)
    ]


def _check_range(name: str, value: range, limit: int) -> None:
    if not value or value.step < 1 or value[0] < 0 or value[-1] >= limit:
        raise LayoutError(
            f"{name}: expected a non-empty ascending range inside [0, {limit}), got {value}"
        )


def _box(view: LayerView, blocks: range, heads: range, tokens: range) -> _Box:
    ratio = view.blocks_per_manager_block
    b, h, n, _ = view.strides
    axes = [(len(heads), heads.step * h), (len(tokens), tokens.step * n)]
    if blocks.step == 1:
        axes.append((len(blocks) * ratio, b))
    else:
        axes += [(len(blocks), blocks.step * ratio * b), (ratio, b)]
    nested = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: -axis[1])
    length = view.shape[3]
    while nested and nested[-1][1] == length:  # cells that touch are one piece
        length *= nested.pop()[0]
    start = view.cell_offset(blocks[0] * ratio, heads[0], tokens[0])
    return _Box(view, start, tuple(nested), length)


@dataclass(frozen=True, slots=True)
class _Part:
    """Runs of a stretch of memory, by length, with the outer two apart: they may be joined."""

    start: int
    stop: int
    first: int  # bytes of the first run
    last: int
    lengths: Counter[int]

    @property
    def single(self) -> bool:
        return self.stop - self.start == self.first


_Joins = Callable[[int, int], bool]


def _touching(stop: int, start: int) -> bool:
    return stop == start


def _carrying(views: Sequence[LayerView]) -> _Joins:
    """Whether nothing of the group lies between two bytes.

    Other groups' cells there belong to the same blocks, which are not theirs meanwhile.
    """

    hit = 0  # the view that kept two runs apart, or the next, mostly keeps the next two apart

    def joins(stop: int, start: int) -> bool:
        nonlocal hit
        if stop == start:
            return True
        for at in (*range(hit, len(views)), *range(hit)):
            if holds_cell(views[at], stop, start):
                hit = at
                return False
        return True

    return joins


def _fold(boxes: Sequence[_Box], joins: _Joins) -> _Part:
    """The runs of all boxes together: side by side, or the outermost axis that they share."""
    ordered = sorted(boxes, key=lambda box: box.start)
    if len(ordered) == 1:
        box = ordered[0]
        if not box.axes:
            length = box.length
            return _Part(box.start, box.stop, length, length, Counter({length: 1}))
        return _repeated(_fold([box.inner()], joins), *box.axes[0], joins)
    if all(a.stop <= b.start for a, b in pairwise(ordered)):
        part = _fold(ordered[:1], joins)
        for box in ordered[1:]:
            part = _side_by_side(part, _fold([box], joins), joins)
        return part
    outermost = {box.axes[:1] for box in ordered}
    if len(outermost) == 1 and ordered[0].axes:
        count, stride = ordered[0].axes[0]
        inner = _fold([box.inner() for box in ordered], joins)
        if inner.stop - inner.start <= stride:
            return _repeated(inner, count, stride, joins)
    # interleaved in another way: a choice that no figure makes, counted one by one
    pieces = _merged([r for box in ordered for r in box.ranges()])
    part = _piece(pieces[0])
    for piece in pieces[1:]:
        part = _side_by_side(part, _piece(piece), joins)
    return part


def _piece(piece: ByteRange) -> _Part:
    length = piece.stop - piece.start
    return _Part(piece.start, piece.stop, length, length, Counter({length: 1}))


def _side_by_side(left: _Part, right: _Part, joins: _Joins) -> _Part:
    lengths = left.lengths + right.lengths
    if not joins(left.stop, right.start):
        return _Part(left.start, right.stop, left.first, right.last, lengths)
    joined = left.last + right.start - left.stop + right.first
    lengths[left.last] -= 1
    lengths[right.first] -= 1
    lengths[joined] += 1
    return _Part(
        left.start,
        right.stop,
        joined if left.single else left.first,
        joined if right.single else right.last,
        +lengths,
    )


def _repeated(part: _Part, count: int, stride: int, joins: _Joins) -> _Part:
    """``count`` copies, ``stride`` apart; strides are constant, so one gap stands for all."""
    stop = part.stop + (count - 1) * stride
    if not joins(part.stop, part.start + stride):
        lengths = Counter({length: times * count for length, times in part.lengths.items()})
        return _Part(part.start, stop, part.first, part.last, lengths)
    if part.single:
        length = stop - part.start
        return _Part(part.start, stop, length, length, Counter({length: 1}))
    lengths = Counter({length: times * count for length, times in part.lengths.items()})
    lengths[part.last] -= count - 1
    lengths[part.first] -= count - 1
    lengths[part.last + part.start + stride - part.stop + part.first] += count - 1
    return _Part(part.start, stop, part.first, part.last, +lengths)


def _merged(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    """The union of ranges, ascending; those that touch or overlap become one."""
    out: list[ByteRange] = []
    for piece in sorted(ranges):
        if out and piece.start <= out[-1].stop:
            out[-1] = ByteRange(out[-1].start, max(out[-1].stop, piece.stop))
        else:
            out.append(piece)
    return out
