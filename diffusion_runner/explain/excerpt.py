"""Which cells of a plan are drawn, and where: memory as rows of tiles, in address order.

Of a long axis the first few indices and the last are shown. What lies between two cells that
are shown is padding, drawn to scale as far as there is room, or cells that are left out, drawn
as one mark of fixed width, so that 10⁶ blocks make the same picture as ten.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from layout_core import LayerView, ResolvedLayout, run_ranges
from layout_core.owners import first_cell_after, holds_cell, last_cell_from
from layout_core.rows import NULL_BLOCK_ID

ELIDED_UNITS: Final = 0.9  #: width of a mark for cells that are left out; a cell is 1
MOST_PADDING_UNITS: Final = 3.0
LEAST_PADDING_UNITS: Final = 0.45


@dataclass(frozen=True, slots=True)
class Shown:
    """Most indices of each axis that are drawn; an axis no longer than ``whole`` is drawn whole."""

    layers: int = 3
    blocks: int = 4
    heads: int = 3
    tokens: int = 3
    whole: int = 4


DEFAULT_SHOWN: Final = Shown()


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell that is drawn."""

    layer: int  #: index into the plan's layers
    group: int
    block: int  #: in the view's blocks
    manager_block: int
    head: int
    token: int  #: of the view's block
    manager_token: int  #: of the manager block
    start: int
    stop: int
    null: bool

    @property
    def key(self) -> str:
        """``l b h n``, as it is typed: counted in manager blocks."""
        return f"{self.layer} {self.manager_block} {self.head} {self.manager_token}"


@dataclass(frozen=True, slots=True)
class Tile:
    """A stretch of memory and its place in the row, in cell widths."""

    start: int
    stop: int
    x: float
    width: float
    kind: str  #: ``"cell"``, ``"padding"`` or ``"elided"``


@dataclass(frozen=True, slots=True)
class Lane:
    """What one group has in a row."""

    group: int
    cells: tuple[Cell, ...]  #: ascending
    padding: tuple[tuple[float, float], ...]  #: (x, width) of bytes without a cell of the group
    hidden: tuple[tuple[float, float], ...]  #: (x, width) of cells that are left out
    runs: tuple[tuple[float, float], ...]  #: (x, width) of the marked block's runs


@dataclass(frozen=True, slots=True)
class Row:
    """A region of the outermost axis: a layer, or a block."""

    start: int
    stop: int
    index: int  #: of the outermost axis, as the first group counts it
    tiles: tuple[Tile, ...]
    lanes: tuple[Lane, ...]

    @property
    def width(self) -> float:
        return self.tiles[-1].x + self.tiles[-1].width

    def place(self, byte: int) -> float:
        """Where a byte of the row (or its end) lies, in cell widths."""
        at = bisect_right(self.tiles, byte, key=lambda tile: tile.start) - 1
        tile = self.tiles[max(at, 0)]
        share = (min(byte, tile.stop) - tile.start) / (tile.stop - tile.start)
        return tile.x + share * tile.width


@dataclass(frozen=True, slots=True)
class Gap:
    """Rows that are left out between two that are shown."""

    start: int
    stop: int
    axis: str  #: ``"L"`` or ``"B"``
    count: int  #: indices left out


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The picture of one plan, before it is drawn."""

    plan: ResolvedLayout
    rows: tuple[Row | Gap, ...]
    block: int  #: the manager block whose runs are marked
    whole: bool  #: nothing is left out

    @property
    def width(self) -> float:
        """Of the widest row, in cell widths."""
        return max(row.width for row in self.rows if isinstance(row, Row))

    @property
    def cells(self) -> Iterable[Cell]:
        for row in self.rows:
            if isinstance(row, Row):
                for lane in row.lanes:
                    yield from lane.cells


def pick(size: int, most: int, whole: int, also: Iterable[int] = ()) -> list[int]:
    """Indices of an axis that are drawn: all, or the first ``most - 1`` and the last."""
    if size <= max(most, whole):
        return list(range(size))
    return sorted({*range(most - 1), size - 1, *(i for i in also if 0 <= i < size)})


def excerpt_of(
    plan: ResolvedLayout,
    *,
    block: int,
    shown: Shown = DEFAULT_SHOWN,
    also: tuple[int, int, int, int] | None = None,
) -> Excerpt:
    """Choose and place what is drawn of a plan.

    Args:
        plan: with at least one layer.
        block: the manager block whose runs are marked.
        shown: most indices of each axis.
        also: a cell ``(layer, block, head, token)`` that must be among those drawn, its block
            in the view's blocks.
    """
    cells, whole = _cells(plan, block, shown, also)
    bounds = _row_bounds(plan, cells)
    unit = min(view.shape[3] for view in plan.layers)
    runs = _marked_runs(plan, block)
    rows: list[Row | Gap] = []
    for (start, stop), inside in bounds.items():
        previous = rows[-1] if rows else None
        if isinstance(previous, Row) and previous.stop < start:
            rows.append(_gap(plan, previous.stop, start))
            whole = False
        rows.append(_row(plan, start, stop, inside, unit, runs))
    return Excerpt(plan, tuple(rows), block, whole)


def _cells(
    plan: ResolvedLayout, block: int, shown: Shown, also: tuple[int, int, int, int] | None
) -> tuple[list[Cell], bool]:
    out = []
    whole = True
    for group in range(len(plan.groups)):
        # in memory order: unlike pages of a group are collected by kind
        layers = sorted(plan.group_layers(group), key=lambda i: plan.layers[i].offset)
        if not layers:
            continue
        wanted = [layers.index(also[0])] if also and also[0] in layers else []
        chosen = [layers[i] for i in pick(len(layers), shown.layers, shown.whole, wanted)]
        whole = whole and len(chosen) == len(layers)
        for layer in chosen:
            view = plan.layers[layer]
            ratio = view.blocks_per_manager_block
            here = also if also and also[0] == layer else None
            # the marked block is drawn in every layer, so that rows compare
            marked = [block, *([also[1] // ratio] if also else [])]
            managers = pick(plan.num_blocks, shown.blocks, shown.whole, marked)
            pieces = pick(ratio, shown.tokens, shown.whole, [also[1] % ratio] if also else [])
            axes = [
                [b * ratio + piece for b in managers for piece in pieces],
                pick(view.shape[1], shown.heads, shown.whole, [here[2]] if here else []),
                pick(view.shape[2], shown.tokens, shown.whole, [here[3]] if here else []),
            ]
            whole = whole and [len(a) for a in axes] == list(view.shape[:3])
            for b in axes[0]:
                for h in axes[1]:
                    for n in axes[2]:
                        start = view.cell_offset(b, h, n)
                        manager = b // ratio
                        out.append(
                            Cell(
                                layer,
                                group,
                                b,
                                manager,
                                h,
                                n,
                                b % ratio * view.shape[2] + n,
                                start,
                                start + view.shape[3],
                                plan.null_block and manager == NULL_BLOCK_ID,
                            )
                        )
    out.sort(key=lambda cell: (cell.start, cell.group))
    return out, whole


def _row_bounds(plan: ResolvedLayout, cells: Sequence[Cell]) -> dict[tuple[int, int], list[Cell]]:
    """Rows as byte ranges with their cells, ascending; the rows of a layout tile its memory."""
    if plan.layout.is_block_outermost:
        first = min(plan.layers, key=lambda view: view.offset)
        ratio = first.blocks_per_manager_block

        def start_of(cell: Cell) -> int:
            return first.cell_offset(cell.manager_block * ratio, 0, 0)

        def stop_of(cell: Cell) -> int:
            following = cell.manager_block + 1
            if following == plan.num_blocks:
                return plan.size_bytes
            return first.cell_offset(following * ratio, 0, 0)
    else:
        offsets = sorted({view.offset for view in plan.layers})

        def start_of(cell: Cell) -> int:
            return plan.layers[cell.layer].offset

        def stop_of(cell: Cell) -> int:
            at = bisect_right(offsets, plan.layers[cell.layer].offset)
            return offsets[at] if at < len(offsets) else plan.size_bytes

    out: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        out.setdefault((start_of(cell), stop_of(cell)), []).append(cell)
    ordered = sorted(out)
    if ordered[0][0] > 0:  # what lies before the first cell belongs to the first row
        out[0, ordered[0][1]] = out.pop(ordered[0])
    return dict(sorted(out.items()))


def _gap(plan: ResolvedLayout, start: int, stop: int) -> Gap:
    if plan.layout.is_block_outermost:
        view = min(plan.layers, key=lambda v: v.offset)
        pitch = view.strides[0] * view.blocks_per_manager_block
        return Gap(start, stop, "B", (stop - start) // pitch)
    offsets = {view.offset for view in plan.layers}
    return Gap(start, stop, "L", sum(start <= offset < stop for offset in offsets))


def _marked_runs(plan: ResolvedLayout, block: int) -> dict[int, list[tuple[int, int]]]:
    out = {}
    for group in range(len(plan.groups)):
        layers = plan.group_layers(group)
        if layers:
            blocks = range(block, block + 1)
            ranges = run_ranges(plan, layers=layers, blocks=blocks, carry_padding=True)
            out[group] = [(r.start, r.stop) for r in ranges]
    return out


def _row(
    plan: ResolvedLayout,
    start: int,
    stop: int,
    cells: Sequence[Cell],
    unit: int,
    runs: dict[int, list[tuple[int, int]]],
) -> Row:
    tiles = _tiles(plan, start, stop, cells, unit)
    axis = "block" if plan.layout.is_block_outermost else "layer"
    bare = Row(start, stop, getattr(cells[0], axis), tiles, ())
    lanes = tuple(_lane(plan, bare, group, cells, runs[group]) for group in sorted(runs))
    return Row(start, stop, bare.index, tiles, lanes)


def _tiles(
    plan: ResolvedLayout, start: int, stop: int, cells: Sequence[Cell], unit: int
) -> tuple[Tile, ...]:
    edges = sorted({start, stop, *(c.start for c in cells), *(c.stop for c in cells)})
    covered = sorted({(c.start, c.stop) for c in cells})
    tiles: list[Tile] = []
    x = 0.0

    def add(first: int, last: int, kind: str) -> None:
        nonlocal x
        width = (last - first) / unit
        if kind == "elided":
            width = ELIDED_UNITS
        elif kind == "padding":
            width = min(max(width, LEAST_PADDING_UNITS), MOST_PADDING_UNITS)
        tiles.append(Tile(first, last, x, width, kind))
        x += width

    ends = {cell.stop: cell.layer for cell in cells}
    starts = {cell.start: cell.layer for cell in cells}
    at = 0
    for first, last in pairwise(edges):
        while at < len(covered) and covered[at][1] <= first:
            at += 1
        if any(a <= first and last <= b for a, b in covered[at : at + len(plan.groups)]):
            add(first, last, "cell")
            continue
        near = (ends.get(first, 0), starts.get(last, len(plan.layers) - 1))
        for piece in _gap_pieces(plan.layers, first, last, near):
            add(*piece)
    return tuple(tiles)


def _gap_pieces(
    views: Sequence[LayerView], start: int, stop: int, near: tuple[int, int]
) -> Iterable[tuple[int, int, str]]:
    """Padding up to the first cell that is left out, the cells left out, padding after them.

    ``near`` are the layers on both sides: where something lies at once beside them, it is
    theirs or a neighbour's, and the search ends there.
    """
    low = stop
    for view in (*views[near[0] :], *views[: near[0]]):
        here = last_cell_from(view, start)
        if here is not None and here.start + view.shape[3] > start:
            low = start
            break
        if (cell := first_cell_after(view, start)) is not None:
            low = min(low, cell.start)
    if low >= stop:
        yield start, stop, "padding"
        return
    high = low
    for view in (*views[near[1] :: -1], *views[: near[1] : -1]):
        if (cell := last_cell_from(view, stop - 1)) is not None:
            high = max(high, cell.start + view.shape[3])
        if high >= stop:
            break
    if low > start:
        yield start, low, "padding"
    yield low, min(high, stop), "elided"
    if high < stop:
        yield high, stop, "padding"


def _lane(
    plan: ResolvedLayout,
    row: Row,
    group: int,
    cells: Sequence[Cell],
    runs: Sequence[tuple[int, int]],
) -> Lane:
    views = [view for view in plan.layers if view.group == group]
    own = [cell for cell in cells if cell.group == group]
    spans = [(cell.start, cell.stop) for cell in own]
    padding: list[tuple[float, float]] = []
    hidden: list[tuple[float, float]] = []
    for tile in row.tiles:
        if any(a <= tile.start and tile.stop <= b for a, b in spans):
            continue
        held = tile.kind == "elided" and len(plan.groups) == 1
        if tile.kind != "padding" and not held:
            held = any(holds_cell(view, tile.start, tile.stop) for view in views)
        _extend(hidden if held else padding, tile.x, tile.width)
    marked: list[tuple[float, float]] = []
    visible = [tile for tile in row.tiles if tile.kind != "elided"]
    for first, last in runs:
        if any(tile.start < last and first < tile.stop for tile in visible):
            low, high = row.place(max(first, row.start)), row.place(min(last, row.stop))
            marked.append((low, high - low))
    return Lane(group, tuple(own), tuple(padding), tuple(hidden), tuple(marked))


def _extend(spans: list[tuple[float, float]], x: float, width: float) -> None:
    if spans and abs(spans[-1][0] + spans[-1][1] - x) < 1e-9:
        spans[-1] = (spans[-1][0], spans[-1][1] + width)
    else:
        spans.append((x, width))
