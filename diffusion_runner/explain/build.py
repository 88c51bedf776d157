"""From a cache to everything that is shown of it: plans, counts and scenes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diffusion_runner.errors import RunError
from diffusion_runner.explain.excerpt import DEFAULT_SHOWN, Excerpt, Shown, excerpt_of
from diffusion_runner.explain.figures import (
    DEFAULT_RANKS,
    DEFAULT_TRANSFER_BLOCKS,
    Figures,
    figures_of,
)
from diffusion_runner.explain.geometry import Cache, Variant, lay_out
from diffusion_runner.explain.locate import CellQuery, find_cell
from diffusion_runner.explain.picture import (
    Look,
    legend,
    look_of,
    panel,
    panel_width,
    refused_panel,
    sheet,
    summary,
)
from diffusion_runner.explain.scene import Scene
from layout_core import KVCacheLayout, ResolvedLayout


@dataclass(frozen=True, slots=True)
class Entry:
    """One layout of the cache with all that is known of it; nothing but the reason if refused."""

    variant: Variant
    figures: Figures | None
    excerpt: Excerpt | None


@dataclass(frozen=True, slots=True)
class Explained:
    """A cache in the chosen layouts."""

    entries: tuple[Entry, ...]
    look: Look
    block: int  #: whose runs are marked

    @property
    def plans(self) -> tuple[ResolvedLayout, ...]:
        """Of the layouts that can hold the cache; at least one."""
        return tuple(e.variant.plan for e in self.entries if e.variant.plan is not None)

    @property
    def title(self) -> str:
        if len(self.entries) == 1:
            return f"A cache in {self.entries[0].variant.layout.name}"
        words = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
        return f"One cache in {words[len(self.entries)]} layouts"


def explain(
    cache: Cache,
    layouts: Sequence[KVCacheLayout],
    *,
    block: int | None = None,
    cell: CellQuery | None = None,
    shown: Shown = DEFAULT_SHOWN,
    transfer: int = DEFAULT_TRANSFER_BLOCKS,
    ranks: int = DEFAULT_RANKS,
) -> Explained:
    """Resolve, count and choose what is drawn.

    Args:
        cache: what is laid out.
        layouts: in the order in which they are shown; at least one.
        block: the block whose runs are marked; ``None``: that of ``cell``, or the first that a
            request can own.
        cell: a cell that must be drawn, and is framed.
        shown: most indices of each axis that are drawn.
        transfer, ranks: see :func:`figures_of`.

    Raises:
        RunError: an argument out of range, or no layout that can hold the cache.
        LayoutError: a cache that contradicts itself.
    """
    variants = lay_out(cache, layouts)
    plans = [variant.plan for variant in variants if variant.plan is not None]
    if block is None:
        usable = 1 if plans[0].null_block and plans[0].num_blocks > 1 else 0
        block = usable if cell is None else cell.block
    if not 0 <= block < plans[0].num_blocks:
        raise RunError(f"block: expected an int in [0, {plans[0].num_blocks}), got {block}")
    entries = []
    for variant in variants:
        if variant.plan is None:
            entries.append(Entry(variant, None, None))
            continue
        also = None if cell is None else find_cell(variant.plan, cell).indices
        figures = figures_of(variant.plan, transfer=transfer, ranks=ranks)
        excerpt = excerpt_of(variant.plan, block=block, shown=shown, also=also)
        entries.append(Entry(variant, figures, excerpt))
    excerpts = [entry.excerpt for entry in entries if entry.excerpt is not None]
    look = look_of(excerpts, None if cell is None else cell.key)
    return Explained(tuple(entries), look, block)


def panels(explained: Explained) -> list[Scene]:
    """One scene for each layout, all of one width and one scale."""
    excerpts = [e.excerpt for e in explained.entries if e.excerpt is not None]
    width = panel_width(explained.look, max(excerpt.width for excerpt in excerpts))
    out = []
    for entry in explained.entries:
        if entry.excerpt is None or entry.figures is None:
            out.append(refused_panel(entry.variant, width))
        else:
            out.append(panel(entry.variant, entry.excerpt, entry.figures, explained.look, width))
    return out


def picture(explained: Explained) -> Scene:
    """All panels under one heading, with a legend: for SVG and PNG."""
    scenes = panels(explained)
    columns = 2 if len(scenes) > 1 else 1
    excerpts = [e.excerpt for e in explained.entries if e.excerpt is not None]
    foot = legend(excerpts, explained.look, columns * scenes[0].width)
    return sheet(scenes, summary(explained.plans[0]), foot, columns=columns, title=explained.title)
