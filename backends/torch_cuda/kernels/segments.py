"""How the queries of one row are cut into attention calls: a host-side plan from intervals.

A kernel sees intervals ``[lo, hi)`` alone. Neighbouring queries that see the same keys need no
mask; a run whose first query sees one key, its second two, ... is exactly what a causal call
does; whatever else comes is cut into tiles with a boolean mask over the keys that some query of
the tile sees. Queries that see nothing are no part of any call: their output is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

MIN_RUN = 16
"""Fewer equal queries than this are not worth a call of their own beside masked neighbours."""

TILE = 256
"""Queries of a masked call: more share the keys of the last, fewer cost calls."""


class Mode(Enum):
    """What an attention call needs."""

    FULL = "full"  #: every query sees all keys of the call
    CAUSAL = "causal"  #: as many keys as queries; query i sees the first i + 1
    MASKED = "masked"  #: a boolean mask made from the intervals


@dataclass(frozen=True, slots=True)
class Segment:
    """One attention call: queries ``[start, end)`` of the row over keys ``[first, last)``."""

    start: int
    end: int
    first: int
    last: int
    mode: Mode


def segment_row(lo: Sequence[int], hi: Sequence[int]) -> list[Segment]:
    """Attention calls for the queries of one row, in order.

    Args:
        lo, hi: for each query its visible keys ``[lo, hi)``, positions in the row.

    Returns:
        Disjoint segments with ``first < last`` that cover every query that sees a key, and no
        other query.
    """
    count = len(lo)
    if count == 0:
        return []
    if lo[0] == lo[-1] and hi[0] == hi[-1] and min(lo) == max(lo) and min(hi) == max(hi):
        return [Segment(0, count, lo[0], hi[0], Mode.FULL)] if lo[0] < hi[0] else []
    out: list[Segment] = []
    mixed = 0  # start of the queries that wait for a masked call
    for start, end, mode in _runs(lo, hi):
        if mode is None:
            continue
        out.extend(_masked(lo, hi, mixed, start))
        if lo[start] < hi[start]:
            out.append(Segment(start, end, lo[start], hi[end - 1], mode))
        mixed = end
    out.extend(_masked(lo, hi, mixed, count))
    return out


def _runs(lo: Sequence[int], hi: Sequence[int]) -> Iterator[tuple[int, int, Mode | None]]:
    """Maximal runs ``(start, end, mode)``; ``None`` for queries that need a mask.

    A run that sees nothing is FULL over no keys, however short it is.
    """
    start, count = 0, len(lo)
    while start < count:
        first, last = lo[start], hi[start]
        end = start + 1
        while end < count and lo[end] == first and hi[end] == last:
            end += 1
        if first == last or end - start >= MIN_RUN:
            yield start, end, Mode.FULL
            start = end
            continue
        if last - first == 1:
            end = start + 1
            while end < count and lo[end] == first and hi[end] == last + end - start:
                end += 1
            if end - start >= MIN_RUN:
                yield start, end, Mode.CAUSAL
                start = end
                continue
            end = start + 1
        yield start, end, None
        start = end


def _masked(lo: Sequence[int], hi: Sequence[int], start: int, end: int) -> Iterator[Segment]:
    for at in range(start, end, TILE):
        stop = min(at + TILE, end)
        first, last = min(lo[at:stop]), max(hi[at:stop])
        same = first == max(lo[at:stop]) and last == min(hi[at:stop])
        yield Segment(at, stop, first, last, Mode.FULL if same else Mode.MASKED)
