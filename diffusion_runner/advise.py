"""``pagestride advise``: the layouts ranked for a use, by counted runs, with the reason in words.

A use says which cells move together. The fewer contiguous runs they make, the fewer copies or
the longer the loads. Counts come from plans; the words only say which axes cut them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from diffusion_runner.errors import RunError
from diffusion_runner.explain.figures import (
    DEFAULT_RANKS,
    DEFAULT_TRANSFER_BLOCKS,
    human_bytes,
    rank_heads,
    transfer_blocks,
)
from diffusion_runner.explain.geometry import Cache, lay_out
from layout_core import KVCacheLayout, ResolvedLayout, Runs, count_runs


class Use(StrEnum):
    """What is done with the cache beside attention itself, or attention alone."""

    ATTENTION = "attention"
    OFFLOAD = "offload"
    TRANSFER = "transfer"
    RESHARD = "reshard"


@dataclass(frozen=True, slots=True)
class Ranked:
    """One layout's place."""

    layout: KVCacheLayout
    place: int | None  #: from 1; equal counts share one; ``None``: it cannot hold the cache
    runs: int  #: the count that decides
    run_bytes: int  #: of the longest run
    ties: tuple[int, ...]  #: the counts that decide between equals, in order
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "layout": self.layout.name,
            "place": self.place,
            "runs": self.runs,
            "run_bytes": self.run_bytes,
            "ties": list(self.ties),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Advice:
    """A use, what was counted for it, and the layouts, best first."""

    use: Use
    counted: str  #: what the runs are of
    ties: tuple[str, ...]  #: what decides between equals
    ranked: tuple[Ranked, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "use": self.use.value,
            "counted": self.counted,
            "ties": list(self.ties),
            "ranked": [item.as_dict() for item in self.ranked],
        }


@dataclass(frozen=True, slots=True)
class _Counts:
    plan: ResolvedLayout
    transfer: int
    ranks: int

    @property
    def groups(self) -> list[tuple[int, ...]]:
        plan = self.plan
        return [layers for g in range(len(plan.groups)) if (layers := plan.group_layers(g))]

    def blocks(self, *, scattered: bool) -> range:
        return transfer_blocks(self.plan, self.transfer)[scattered]

    def head(self, *, scattered: bool) -> list[Runs]:
        """One head of one layer of each group, as a kernel reads it for one row."""
        blocks = self.blocks(scattered=scattered)
        return [
            count_runs(self.plan, layers=layers[:1], blocks=blocks, heads=range(1))
            for layers in self.groups
        ]

    def token(self) -> list[Runs]:
        """One token of all heads of one layer, as a step writes it."""
        blocks = self.blocks(scattered=False)[:1]
        return [
            count_runs(self.plan, layers=layers[:1], blocks=blocks, tokens=range(1))
            for layers in self.groups
        ]

    def whole(self, blocks: range) -> list[Runs]:
        return [count_runs(self.plan, layers=layers, blocks=blocks) for layers in self.groups]

    def slices(self, *, scattered: bool) -> list[Runs]:
        """Each rank's heads of the blocks, over all layers."""
        blocks = self.blocks(scattered=scattered)
        out = []
        for layers in self.groups:
            for rank in range(self.ranks):
                heads = rank_heads(self.plan, layers, self.ranks, rank)
                holding = [at for at, slots in enumerate(heads) if slots]
                if holding:
                    out.append(
                        count_runs(
                            self.plan,
                            layers=[layers[at] for at in holding],
                            blocks=blocks,
                            heads=[heads[at] for at in holding],
                        )
                    )
        return out


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a use is counted: what decides, then what decides between equals."""

    decides: Callable[[_Counts], list[Runs]]
    ties: tuple[tuple[str, Callable[[_Counts], list[Runs]]], ...]
    cut: str  #: axes of which a part is taken; the rest is taken whole


_READ = ("a head's read", lambda c: c.head(scattered=True))
_RULES: Final[dict[Use, _Rule]] = {
    Use.ATTENTION: _Rule(
        lambda c: c.head(scattered=True),
        (
            ("the same of neighbouring blocks", lambda c: c.head(scattered=False)),
            ("a token's write", lambda c: c.token()),
        ),
        "LBH",
    ),
    Use.OFFLOAD: _Rule(lambda c: c.whole(c.blocks(scattered=False)[:1]), (_READ,), "B"),
    Use.TRANSFER: _Rule(
        lambda c: c.whole(c.blocks(scattered=True)),
        (("the same side by side", lambda c: c.whole(c.blocks(scattered=False))), _READ),
        "B",
    ),
    Use.RESHARD: _Rule(
        lambda c: c.slices(scattered=True),
        (("the same side by side", lambda c: c.slices(scattered=False)), _READ),
        "BH",
    ),
}


def advise(
    cache: Cache,
    use: Use,
    *,
    transfer: int = DEFAULT_TRANSFER_BLOCKS,
    ranks: int = DEFAULT_RANKS,
) -> Advice:
    """Rank the six layouts for one use.

    Args:
        cache: what is laid out.
        use: what is done with it.
        transfer: blocks that a row has, or that are moved together; >= 1.
        ranks: tensor-parallel ranks that this worker's heads are dealt to; >= 2.

    Raises:
        RunError: a number out of range, or no layout that can hold the cache.
        LayoutError: a cache that contradicts itself.
    """
    if type(transfer) is not int or transfer < 1:
        raise RunError(f"transfer: expected an int >= 1, got {transfer!r}")
    if type(ranks) is not int or ranks < 2:
        raise RunError(f"ranks: expected an int >= 2, got {ranks!r}")
    rule = _RULES[use]
    found: list[tuple[tuple[int, ...], Ranked]] = []
    refused: list[Ranked] = []
    variants = lay_out(cache, tuple(KVCacheLayout))
    for variant in variants:
        if variant.plan is None:
            refused.append(Ranked(variant.layout, None, 0, 0, (), variant.refusal or ""))
            continue
        counts = _Counts(variant.plan, transfer, ranks)
        runs = rule.decides(counts)
        ties = tuple(_total(count(counts)) for _, count in rule.ties)
        reason = _reason(variant.plan, rule.cut, runs, use)
        longest = max(run.longest for run in runs)
        item = Ranked(variant.layout, None, _total(runs), longest, ties, reason)
        found.append(((item.runs, *ties), item))
    found.sort(key=lambda pair: pair[0])  # stable: equals keep the order of the enum
    keys = [key for key, _ in found]
    placed = [
        Ranked(i.layout, keys.index(key) + 1, i.runs, i.run_bytes, i.ties, i.reason)
        for key, i in found
    ]
    plan = next(variant.plan for variant in variants if variant.plan is not None)
    counted = _counted(plan, use, transfer, ranks)
    names = tuple(name for name, _ in rule.ties)
    return Advice(use, counted, names, (*placed, *refused))


def _total(runs: Sequence[Runs]) -> int:
    return sum(item.count for item in runs)


def _counted(plan: ResolvedLayout, use: Use, transfer: int, ranks: int) -> str:
    scattered = len(transfer_blocks(plan, transfer)[1])
    blocks = f"{scattered} scattered block{'s' if scattered != 1 else ''}"
    each = " of each group" if len(plan.groups) > 1 else ""
    return {
        Use.ATTENTION: f"one KV head of {blocks}, in one layer{each}: what a kernel reads",
        Use.OFFLOAD: f"one block{each}, all layers",
        Use.TRANSFER: f"{blocks}{each}, all layers",
        Use.RESHARD: f"{blocks}{each}, all layers, the heads of each of {ranks} ranks apart",
    }[use]


_NOUNS: Final = {"L": "layer", "B": "block", "H": "head", "N": "token"}


def cutting_axes(layout: KVCacheLayout, cut: str, sizes: dict[str, int]) -> tuple[str, list[str]]:
    """The innermost cut axis longer than 1, and the longer axes outside it: a run for each index.

    ``cut`` are the axes of which a part is taken. An axis of size 1 parts nothing.
    """
    order = [axis for axis in layout.name if axis != "C" and sizes[axis] > 1]
    places = [i for i, axis in enumerate(order) if axis in cut]
    if not places:
        return "", []
    return order[places[-1]], order[: places[-1]]


def _reason(plan: ResolvedLayout, cut: str, runs: Sequence[Runs], use: Use) -> str:
    sizes = {
        "L": max(len(plan.group_layers(g)) for g in range(len(plan.groups))),
        "B": plan.num_blocks,
        "H": max(view.shape[1] for view in plan.layers),
        "N": max(view.shape[2] for view in plan.layers),
    }
    innermost, outside = cutting_axes(plan.layout, cut, sizes)
    size = human_bytes(max(run.longest for run in runs))
    padding = sum(run.padding_bytes for run in runs)
    carried = f", {human_bytes(padding)} of it padding that is carried along" if padding else ""
    # of the axes outside, those of which one index is taken make no more runs
    alone = "LH" if use is Use.ATTENTION else ""
    parted = [axis for axis in outside if axis not in alone and axis != "B"]
    if not parted:
        what = {
            Use.ATTENTION: "one head's tokens of a block lie together",
            Use.OFFLOAD: "a block of all layers lies together",
            Use.TRANSFER: "a block of all layers lies together",
            Use.RESHARD: "a rank's heads of a block lie together in all layers",
        }[use]
        return f"{what}: runs of {size}{carried}"
    names = _and(parted)
    several = len(parted) > 1
    each = _and([f"{_NOUNS[axis]}" for axis in parted])
    return (
        f"{names} lie{'' if several else 's'} outside {innermost}: a run for each {each}, "
        f"{size} long{carried}"
    )


def _and(words: Sequence[str]) -> str:
    return " and ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])} and {words[-1]}"
