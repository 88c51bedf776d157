"""Where two layouts of one cache disagree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diffusion_runner.explain.build import Explained, panels
from diffusion_runner.explain.locate import CellQuery, find_cell
from diffusion_runner.explain.picture import legend, sheet, summary
from diffusion_runner.explain.scene import Scene
from layout_core import LayerView, ResolvedLayout
from layout_core.owners import first_cell_after

EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Moved:
    """A cell that the second plan keeps elsewhere."""

    cell: CellQuery
    first: int  #: its first byte in the first plan
    second: int  #: in the second

    def as_dict(self) -> dict[str, Any]:
        return {"cell": self.cell.key, "first": self.first, "second": self.second}


@dataclass(frozen=True, slots=True)
class Difference:
    """Two plans of one cache, cell by cell."""

    first: ResolvedLayout
    second: ResolvedLayout
    cells: int  #: of all layers
    same: int  #: that lie at the same byte in both
    examples: tuple[Moved, ...]  #: the first that do not, in the first plan's order in memory

    @property
    def moved(self) -> int:
        return self.cells - self.same

    def as_dict(self) -> dict[str, Any]:
        return {
            "first": self.first.layout.name,
            "second": self.second.layout.name,
            "cells": self.cells,
            "same": self.same,
            "moved": self.moved,
            "examples": [moved.as_dict() for moved in self.examples],
        }


def difference(first: ResolvedLayout, second: ResolvedLayout) -> Difference:
    """Compare two plans of one cache; counted from the strides, so real sizes are quick."""
    pairs = list(zip(first.layers, second.layers))
    cells = sum(b * h * n for b, h, n in (view.shape[:3] for view in first.layers))
    same = sum(_same_cells(a, b) for a, b in pairs)
    examples: list[Moved] = []
    if same < cells:
        for query, start in _in_memory_order(first):
            other = find_cell(second, query).start
            if other != start:
                examples.append(Moved(query, start, other))
                if len(examples) == EXAMPLES:
                    break
    return Difference(first, second, cells, same, tuple(examples))


def _same_cells(a: LayerView, b: LayerView) -> int:
    """Cells ``(b, h, n)`` whose first byte is the same in both views.

    The two differ by a constant and a step for each axis; for each head and token at most one
    block makes up for it, unless the block steps are equal.
    """
    blocks, heads, tokens, _ = a.shape
    step, head_step, token_step = (y - x for x, y in zip(a.strides[:3], b.strides[:3]))
    apart = (
        b.offset
        - a.offset
        + head_step * np.arange(heads, dtype=np.int64)[:, None]
        + token_step * np.arange(tokens, dtype=np.int64)[None, :]
    )
    if blocks == 1 or step == 0:
        return int((apart == 0).sum()) * blocks
    block, rest = np.divmod(-apart, step)
    return int(((rest == 0) & (block >= 0) & (block < blocks)).sum())


def _in_memory_order(plan: ResolvedLayout) -> Iterator[tuple[CellQuery, int]]:
    byte = -1
    while True:
        following = [
            (cell.start, layer, cell)
            for layer, view in enumerate(plan.layers)
            if (cell := first_cell_after(view, byte)) is not None
        ]
        if not following:
            return
        byte = min(following)[0]
        for start, layer, cell in following:
            if start == byte:
                view = plan.layers[layer]
                block, piece = divmod(cell.block, view.blocks_per_manager_block)
                token = piece * view.shape[2] + cell.token
                yield CellQuery(layer, block, cell.head, token), start


def pale_where_equal(explained: Explained, found: Difference) -> Explained:
    """The two layouts, with the cells that lie at the same byte in both drawn pale."""
    starts = [
        {cell.key: cell.start for cell in entry.excerpt.cells}
        for entry in explained.entries
        if entry.excerpt is not None
    ]
    agree = frozenset(
        {
            key
            for known, plan in zip(starts, (found.second, found.first))
            for key, start in known.items()
            if find_cell(plan, CellQuery(*map(int, key.split()))).start == start
        }
    )
    return replace(explained, look=replace(explained.look, faded=agree))


def diff_picture(pale: Explained, found: Difference) -> Scene:
    """Both layouts side by side; ``pale`` is from :func:`pale_where_equal`."""
    scenes = panels(pale)
    excerpts = [entry.excerpt for entry in pale.entries if entry.excerpt is not None]
    line, how = summary(found.first)
    names = f"{found.first.layout.name} and {found.second.layout.name}"
    verdict = f"{found.moved:,} of {found.cells:,} cells lie elsewhere; those that agree are pale. "
    foot = legend(excerpts, pale.look, 2 * scenes[0].width)
    title = f"Where {names} disagree"
    return sheet(scenes, (line, verdict + how), foot, columns=2, title=title)
