"""The figures that a layout is chosen by, counted on its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_runner.errors import RunError
from layout_core import (
    PaddingBytes,
    ResolvedLayout,
    Runs,
    count_runs,
    pad_heads,
    padding_of,
)

DEFAULT_TRANSFER_BLOCKS = 16
DEFAULT_RANKS = 2


@dataclass(frozen=True, slots=True)
class Figure:
    """One count: in how many contiguous runs something lies."""

    key: str  #: in JSON, and for looking up
    title: str
    runs: tuple[Runs, ...]  #: one for each group that has layers

    @property
    def count(self) -> int:
        return sum(runs.count for runs in self.runs)

    @property
    def num_bytes(self) -> int:
        return sum(runs.num_bytes for runs in self.runs)

    @property
    def padding_bytes(self) -> int:
        return sum(runs.padding_bytes for runs in self.runs)

    @property
    def shortest(self) -> int:
        return min(runs.shortest for runs in self.runs)

    @property
    def longest(self) -> int:
        return max(runs.longest for runs in self.runs)

    def as_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "runs": self.count,
            "bytes": self.num_bytes,
            "padding_bytes": self.padding_bytes,
            "shortest_run": self.shortest,
            "longest_run": self.longest,
        }


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of one plan. Runs carry padding along, as a copy of whole pages does."""

    page: Figure  #: one block of one layer
    block: Figure  #: one block over all layers of its group
    layer: Figure  #: one layer over all blocks
    head: Figure  #: one KV head of one block and one layer
    rank: Figure  #: the heads of one rank in one block, over all layers
    adjacent: Figure  #: k neighbouring blocks over all layers
    scattered: Figure  #: k blocks that do not touch, over all layers
    padding: PaddingBytes

    def __iter__(self) -> Iterator[Figure]:
        return iter(
            (
                self.page,
                self.block,
                self.layer,
                self.head,
                self.rank,
                self.adjacent,
                self.scattered,
            )
        )


def rank_heads(plan: ResolvedLayout, layers: Sequence[int], ranks: int, rank: int) -> list[range]:
    """For each layer the head slots that one of ``ranks`` ranks takes over of this worker's.

    Where there are fewer heads than ranks several ranks take the same one.
    """
    out = []
    for layer in layers:
        heads = plan.layers[layer].shape[1]
        owned = pad_heads(heads, heads, ranks).owners[rank]
        real = [head for head in owned if head < heads]
        out.append(range(real[0], real[-1] + 1) if real else range(0))
    return out


def transfer_blocks(plan: ResolvedLayout, wanted: int) -> tuple[range, range]:
    """``wanted`` adjacent blocks and as many scattered ones, or as many as there are.

    The null block stays out where there is another.
    """
    first = 1 if plan.null_block and plan.num_blocks > 1 else 0
    usable = plan.num_blocks - first
    adjacent = min(wanted, usable)
    scattered = min(wanted, (usable + 1) // 2)
    return range(first, first + adjacent), range(first, first + 2 * scattered - 1, 2)


def figures_of(
    plan: ResolvedLayout,
    *,
    transfer: int = DEFAULT_TRANSFER_BLOCKS,
    ranks: int = DEFAULT_RANKS,
) -> Figures:
    """Count the figures of a plan.

    Args:
        plan: any plan with a layer.
        transfer: blocks of a transfer; >= 1.
        ranks: of tensor parallelism, that the heads of this worker are divided over; >= 1.

    Raises:
        RunError: ``transfer`` or ``ranks`` below 1.
    """
    for name, value in (("transfer", transfer), ("ranks", ranks)):
        if type(value) is not int or value < 1:
            raise RunError(f"{name}: expected an int >= 1, got {value!r}")
    adjacent, scattered = transfer_blocks(plan, transfer)
    one = adjacent[:1]
    groups = [layers for g in range(len(plan.groups)) if (layers := plan.group_layers(g))]

    def over_groups(key: str, title: str, blocks: range) -> Figure:
        return Figure(
            key, title, tuple(count_runs(plan, layers=group, blocks=blocks) for group in groups)
        )

    first = groups[0][:1]
    return Figures(
        page=Figure(
            "page",
            "one block of one layer (a page)",
            (count_runs(plan, layers=first, blocks=one),),
        ),
        block=over_groups("block", "one block, all layers", one),
        layer=Figure(
            "layer",
            "one layer, all blocks",
            (count_runs(plan, layers=first, blocks=range(plan.num_blocks)),),
        ),
        head=Figure(
            "head",
            "one head of a page",
            (count_runs(plan, layers=first, blocks=one, heads=range(1)),),
        ),
        rank=Figure(
            "rank",
            f"one of {ranks} ranks' heads of one block, all layers",
            tuple(
                count_runs(plan, layers=group, blocks=one, heads=rank_heads(plan, group, ranks, 0))
                for group in groups
            ),
        ),
        adjacent=over_groups("adjacent", f"{_blocks(adjacent)} side by side, all layers", adjacent),
        scattered=over_groups(
            "scattered", f"{_blocks(scattered)} scattered, all layers", scattered
        ),
        padding=padding_of(plan),
    )


def _blocks(blocks: range) -> str:
    return f"{len(blocks)} block{'s' if len(blocks) > 1 else ''}"


def human_bytes(size: int) -> str:
    """A size in the largest unit that it reaches: ``96 B``, ``2 KiB``, ``1.5 MiB``."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if value == int(value) else f"{value:,.1f} {unit}"
