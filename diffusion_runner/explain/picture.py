"""Plans as scenes: one panel for each layout, a heading and a legend.

Colour is the layer, lightness the head. A bar under the cells marks the runs of one block over
all layers: as many bars, as many pieces to copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

from diffusion_runner.explain.excerpt import Cell, Excerpt, Gap, Lane, Row
from diffusion_runner.explain.figures import Figures, human_bytes
from diffusion_runner.explain.geometry import Variant
from diffusion_runner.explain.scene import (
    HUES,
    Rect,
    Scene,
    Shape,
    Text,
    luminance,
    mixed,
    text_width,
)
from layout_core import ResolvedLayout

PANEL_INSIDE: Final = 620.0  #: pixels for the widest row
_LEAST_UNIT, _MOST_UNIT = 7.0, 30.0
_GUTTER = 112.0  # left of the rows: index and address
_PAD = 16.0
_HEAD = 50.0
_BAND, _CELL, _BAR = 15.0, 24.0, 9.0
_LANE = _BAND + _CELL + _BAR
_ROW_GAP = 9.0
_GAP_ROW = 20.0
_INSIDE = 9.0  # text in a cell
_AXIS_OF: Final = {1: "block", 2: "head", 3: "token", 0: "layer"}
_LETTER: Final = "LBHN"


@dataclass(frozen=True, slots=True)
class Look:
    """What a panel is drawn with."""

    unit: float  #: pixels of one cell
    colours: Mapping[int, str]  #: layer -> hue
    shades: Mapping[int, float]  #: head -> share of white
    faded: frozenset[str] = frozenset()  #: keys of cells to draw pale
    marked: str | None = None  #: key of a cell to frame


def look_of(excerpts: Sequence[Excerpt], marked: str | None = None) -> Look:
    """One scale and one set of colours for panels that are compared."""
    cells = [cell for excerpt in excerpts for cell in excerpt.cells]
    widest = max(excerpt.width for excerpt in excerpts)
    layers = sorted({cell.layer for cell in cells})
    heads = sorted({cell.head for cell in cells})
    return Look(
        unit=min(max(PANEL_INSIDE / widest, _LEAST_UNIT), _MOST_UNIT),
        colours={layer: HUES[i % len(HUES)] for i, layer in enumerate(layers)},
        shades={head: 0.62 * i / max(1, len(heads) - 1) for i, head in enumerate(heads)},
        marked=marked,
    )


def fill_of(cell: Cell, look: Look) -> str:
    """The colour of a cell that is not the null block's."""
    return mixed(look.colours[cell.layer], "#ffffff", look.shades[cell.head])


def panel_width(look: Look, widest: float) -> float:
    return _GUTTER + max(widest * look.unit, 360.0) + 2 * _PAD


def panel(variant: Variant, excerpt: Excerpt, figures: Figures, look: Look, width: float) -> Scene:
    """One layout: its name, the figures it is chosen by, its memory."""
    shapes: list[Shape] = []
    layout = variant.layout
    name = layout.name
    shapes.append(Text(_PAD, 26, name, 17, bold=True))
    x = _PAD + text_width(name, 17, bold=True) + 10
    note = _layout_words(variant)
    shapes.append(Text(x, 26, note, 11.5, "muted"))
    counts = [runs.count for runs in figures.block.runs]
    runs = " + ".join(f"{count:,}" for count in counts)
    runs += f" run{'s' if sum(counts) != 1 else ''} for block {excerpt.block} over "
    runs += "all layers" if len(counts) == 1 else "the layers of each group"
    shapes.append(Text(_PAD, 44, runs, 11.5, "accent", bold=True))
    x = _PAD + text_width(runs, 11.5, bold=True) + 14
    detail = f"{figures.head.count:,} for a head of a page, {figures.layer.count:,} for a layer"
    if figures.padding.unused:
        detail += f"; {human_bytes(figures.padding.unused)} of padding"
    shapes.append(Text(x, 44, detail, 11.5, "muted"))
    y = _HEAD + 6
    for item in excerpt.rows:
        if isinstance(item, Gap):
            shapes += _gap_row(item, y)
            y += _GAP_ROW
            continue
        shapes += _row(excerpt, item, y, look)
        y += _LANE * len(item.lanes) + _ROW_GAP
    return _framed(width, y + _PAD - _ROW_GAP, shapes, name)


def refused_panel(variant: Variant, width: float) -> Scene:
    """The place of a layout that cannot hold the cache, with the reason."""
    shapes: list[Shape] = [Text(_PAD, 26, variant.layout.name, 17, "muted", bold=True)]
    x = _PAD + text_width(variant.layout.name, 17, bold=True) + 10
    shapes.append(Text(x, 26, "cannot hold this cache", 11.5, "accent", bold=True))
    lines = _wrapped(variant.refusal or "", width - 2 * _PAD, 11.5)
    for i, line in enumerate(lines):
        shapes.append(Text(_PAD, 48 + 16 * i, line, 11.5, "muted"))
    return _framed(width, 48 + 16 * len(lines), shapes, variant.layout.name)


def _framed(width: float, height: float, shapes: Sequence[Shape], title: str) -> Scene:
    ground = Rect(0, 0, width, height, "panel")
    return Scene(width, height, (ground, *shapes), title)


def _layout_words(variant: Variant) -> str:
    layout = variant.layout
    if layout.is_block_outermost:
        words = "a block of all layers is one region"
    elif layout.is_block_compact:
        words = "a layer is one region, a page one run"
    else:
        words = "a layer is one region, a head one run in it"
    return f"{words}; the config's own" if variant.carried else words


def _wrapped(text: str, width: float, size: float) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _gap_row(gap: Gap, y: float) -> list[Shape]:
    noun = {"L": "layer", "B": "block"}[gap.axis]
    plural = "s" if gap.count > 1 else ""
    text = f"⋮  {gap.count:,} {noun}{plural} left out, {human_bytes(gap.stop - gap.start)}"
    return [Text(_PAD + _GUTTER, y + 9, text, 10.5, "muted")]


def _row(excerpt: Excerpt, row: Row, y: float, look: Look) -> list[Shape]:
    shapes: list[Shape] = []
    plan = excerpt.plan
    left = _PAD + _GUTTER
    outer = plan.layout.stride_order[0]
    several = len(row.lanes) > 1
    for i, lane in enumerate(row.lanes):
        top = y + i * _LANE
        label = axis_label(plan, lane.cells[0], outer) if lane.cells else "–"
        if lane.cells and outer == 1:  # a row is a manager block, whatever it is split into
            label = f"B{lane.cells[0].manager_block}"
        if lane.cells and outer == 1 and lane.cells[0].null:
            label += " null"
        if several:
            label += f" · group {lane.group}"
        shapes.append(Text(_PAD, top + _BAND + 10, label, 11.5, bold=True))
        if i == 0:
            shapes.append(Text(_PAD, top + _BAND + 22, f"{row.start:#x}", 9.5, "muted", mono=True))
        shapes += _lane(excerpt, row, lane, left, top, look)
    return shapes


def axis_label(plan: ResolvedLayout, cell: Cell, axis: int) -> str:
    """``B3``, ``H0``, ...; a kernel block as its manager block and its place in it: ``B3.1``."""
    index = getattr(cell, _AXIS_OF[axis])
    if axis == 1 and plan.layers[cell.layer].blocks_per_manager_block > 1:
        ratio = plan.layers[cell.layer].blocks_per_manager_block
        return f"B{cell.manager_block}.{index % ratio}"
    return f"{_LETTER[axis]}{index}"


def describe(plan: ResolvedLayout, cell: Cell) -> str:
    """What is said on pointing at a cell."""
    view = plan.layers[cell.layer]
    where = f"layer {cell.layer} ({view.name}), block {cell.manager_block}"
    if view.blocks_per_manager_block > 1:
        where += f" (kernel block {cell.block})"
    where += f", head {cell.head}, token {cell.token}"
    bytes_ = f"bytes [{cell.start:#x}, {cell.stop:#x})"
    null = "; the null block: held back, never written" if cell.null else ""
    return f"{where}: {bytes_}{null}"


def _lane(
    excerpt: Excerpt, row: Row, lane: Lane, left: float, top: float, look: Look
) -> list[Shape]:
    plan, unit = excerpt.plan, look.unit
    order = plan.layout.stride_order
    shapes: list[Shape] = []
    cell_top = top + _BAND
    for x, width in lane.padding:
        shapes.append(
            Rect(left + x * unit, cell_top, width * unit - 1, _CELL, "panel", hatch="padding")
        )
    for x, width in lane.hidden:
        middle = left + (x + width / 2) * unit
        size = min(11.0, 0.9 * width * unit)
        shapes.append(Text(middle, cell_top + _CELL / 2 + 4, "⋯", size, "muted", "middle"))
    for cell in lane.cells:
        shapes.append(_cell(plan, row, cell, left, cell_top, look))
    # the second axis above the cells, the third inside them
    split = any(plan.layers[c.layer].blocks_per_manager_block > 1 for c in lane.cells)
    # of a block that is split, the pieces: layouts with B outermost split but one layer
    second = 1 if split and order[0] == 1 else order[1]
    for _, members in groupby(lane.cells, key=lambda c: getattr(c, _AXIS_OF[second])):
        found = list(members)
        low, high = row.place(found[0].start), row.place(found[-1].stop)
        label = axis_label(plan, found[0], second)
        if found[0].null and order[1] == 1:
            label += " null"
        x, width = left + low * unit, (high - low) * unit
        if text_width(label, 10) > width:
            label = label.removesuffix(" null")
        if text_width(label, 10) <= width:
            shapes.append(Text(x, top + _BAND - 4, label, 10, "muted"))
        shapes.append(Rect(x, top + _BAND - 2, width - 1, 1, "faint"))
        for _, inner in groupby(found, key=lambda c: getattr(c, _AXIS_OF[order[2]])):
            span = list(inner)
            label = axis_label(plan, span[0], order[2])
            _inside(shapes, row, span, label, left, cell_top, look)
    for x, width in lane.runs:
        shapes.append(
            Rect(left + x * unit + 1, cell_top + _CELL + 2.5, width * unit - 3, 4, "accent")
        )
    return shapes


def _cell(plan: ResolvedLayout, row: Row, cell: Cell, left: float, top: float, look: Look) -> Rect:
    x = left + row.place(cell.start) * look.unit
    width = (row.place(cell.stop) - row.place(cell.start)) * look.unit - 1
    framed = cell.key == look.marked
    fill = fill_of(cell, look)
    return Rect(
        x,
        top,
        width,
        _CELL,
        "null" if cell.null else fill,
        stroke="ink" if framed else fill if cell.null else None,
        opacity=0.16 if cell.key in look.faded else 1.0,
        title=describe(plan, cell),
        data={"c": cell.key, "a": str(cell.start)},
    )


def _inside(
    shapes: list[Shape],
    row: Row,
    span: Sequence[Cell],
    label: str,
    left: float,
    top: float,
    look: Look,
) -> None:
    """A label in the first of some cells, where it fits."""
    first = span[0]
    if first.key in look.faded or (first.null and label[0] != "B"):
        return
    fill = fill_of(first, look)
    # the first cell, and those that touch it and look like it where it is too narrow
    low, high = row.place(first.start), row.place(first.stop)
    for cell, following in pairwise(span):
        if text_width(label, _INSIDE) <= (high - low) * look.unit - 1:
            break
        if cell.stop < following.start or fill_of(following, look) != fill:
            return
        high = row.place(following.stop)
    if text_width(label, _INSIDE) > (high - low) * look.unit - 1:
        return
    colour = "#1c2530" if luminance(fill) > 0.52 else "#ffffff"
    if first.null:
        colour = "muted"
    middle = left + (low + high) / 2 * look.unit - 0.5
    shapes.append(Text(middle, top + _CELL / 2 + 3.2, label, _INSIDE, colour, "middle"))


def legend(excerpts: Sequence[Excerpt], look: Look, width: float) -> Scene:
    """What the colours and marks mean, wrapped to a width."""
    plan = excerpts[0].plan
    cells = [cell for excerpt in excerpts for cell in excerpt.cells]
    base = HUES[0]
    entries: list[tuple[list[Rect], str]] = []
    for layer, colour in look.colours.items():
        entries.append(([_swatch(colour)], f"layer {layer}"))
    if len(look.shades) > 1:
        swatches = [
            Rect(i * 15.0, 0, 14, 14, mixed(base, "#ffffff", share))
            for i, share in enumerate(look.shades.values())
        ]
        heads = list(look.shades)
        entries.append((swatches, f"heads {', '.join(map(str, heads))}"))
    if any(cell.null for cell in cells):
        entries.append(([_swatch("null", stroke=base)], "null block: held back, never written"))
    if any(
        lane.padding
        for excerpt in excerpts
        for row in excerpt.rows
        if isinstance(row, Row)
        for lane in row.lanes
    ):
        entries.append(([_swatch("panel", hatch="padding")], "padding"))
    if not all(excerpt.whole for excerpt in excerpts):
        entries.append(([], "⋯ cells left out"))
    block = excerpts[0].block
    entries.append(([Rect(0, 5, 22, 4, "accent")], f"a run of block {block}"))
    if len(plan.groups) > 1:
        entries.append(([], "groups overlay each other: lanes of one row are the same bytes"))
    shapes: list[Shape] = []
    x, y = 0.0, 0.0
    for swatches, label in entries:
        inside = max((s.x + s.width for s in swatches), default=-6.0)
        needed = inside + 6 + text_width(label, 11.5) + 20
        if x and x + needed > width:
            x, y = 0.0, y + 22
        shapes += [
            Rect(s.x + x, s.y + y, s.width, s.height, s.fill, s.stroke, s.hatch) for s in swatches
        ]
        shapes.append(Text(x + inside + 6, y + 11.5, label, 11.5, "muted"))
        x += needed
    return Scene(width, y + 18, tuple(shapes), "legend")


def _swatch(fill: str, **marks: str) -> Rect:
    return Rect(0, 0, 14, 14, fill, **marks)  # type: ignore[arg-type]


def summary(plan: ResolvedLayout) -> tuple[str, str]:
    """Two lines: what the cache holds, and how the picture is read."""
    views = plan.layers
    heads = sorted({view.shape[1] for view in views})
    tokens = sorted({view.block_size * view.blocks_per_manager_block for view in views})
    pieces = sorted({view.block_size for view in views if view.blocks_per_manager_block > 1})
    sizes = sorted({view.shape[3] for view in views})
    dtypes = sorted({view.dtype.name for view in views})
    parts = [
        _count(len(views), "layer"),
        _count(plan.num_blocks, "block")
        + f" of {_or(tokens)} tokens"
        + (f" in kernel blocks of {_or(pieces)}" if pieces else ""),
        f"{_or(heads)} KV head{'s' if heads[-1] > 1 else ''}",
        ", ".join(dtypes),
    ]
    if len(plan.groups) > 1:
        parts.insert(1, f"{len(plan.groups)} groups")
    line = " · ".join(parts) + f" · {human_bytes(plan.size_bytes)}"
    how = (
        "Memory runs from left to right, row by row. A cell is the K ‖ V of one head and one "
        f"token: {_or(sizes)} bytes."
    )
    return line, how


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def _or(values: Sequence[int]) -> str:
    return " or ".join(f"{value:,}" for value in values)


def sheet(
    panels: Sequence[Scene], head: tuple[str, str], foot: Scene | None, *, columns: int, title: str
) -> Scene:
    """Panels in columns, filled from top to bottom, under a heading."""
    margin, between = 24.0, 14.0
    per_column = -(-len(panels) // columns)
    stacks = [panels[i : i + per_column] for i in range(0, len(panels), per_column)]
    widths = [max(p.width for p in stack) for stack in stacks]
    width = 2 * margin + sum(widths) + between * (len(stacks) - 1)
    shapes: list[Shape] = [
        Text(margin, 40, title, 20, bold=True),
        Text(margin, 62, head[0], 13),
    ]
    y = 82.0
    for line in _wrapped(head[1], width - 2 * margin, 12):
        shapes.append(Text(margin, y, line, 12, "muted"))
        y += 17
    top = y + 4
    x, bottom = margin, top
    heights = [
        max(stack[i].height for stack in stacks if i < len(stack)) for i in range(per_column)
    ]
    for stack, stack_width in zip(stacks, widths):
        y = top
        for i, scene in enumerate(stack):
            shapes.append(Rect(x, y, stack_width, heights[i], "panel"))
            shapes += scene.moved(x, y)
            y += heights[i] + between
        bottom = max(bottom, y)
        x += stack_width + between
    if foot is not None:
        shapes += foot.moved(margin, bottom + 4)
        bottom += 4 + foot.height
    height = bottom + 14
    return Scene(width, height, (Rect(0, 0, width, height, "ground"), *shapes), title)
