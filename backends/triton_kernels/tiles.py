"""The work list of an attention step: which queries share a program, and which keys they see.

A program takes some neighbouring queries of one row. What it needs of the rules is in four
numbers, the extremes of its queries' intervals: keys outside ``[lo_min, hi_max)`` are never
loaded, keys inside ``[lo_max, hi_min)`` need no mask. The list is data, so that a captured
step can be refilled; entries beyond it have no queries and do nothing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

TILE_FIELDS = 8
"""Numbers of an entry: row, first query, queries, lo_min, hi_max, lo_max, hi_min, and the
extent: the id that block 0 of the row would have if its blocks were those that are read."""


def query_tiles(
    cu_seqlens: Sequence[int],
    num_tokens: int,
    lo: Sequence[int],
    hi: Sequence[int],
    queries: int,
) -> array[int]:
    """Cut the packed queries into tiles of at most ``queries``, none across two rows.

    Tiles with most keys come first, so that the longest programs do not start last. Padded
    queries, which follow the last row, get tiles that see nothing: their output is zero.

    Args:
        cu_seqlens: ``[R + 1]``, first query of each row; the last is the number of real queries.
        num_tokens: queries with padding, ``T``.
        lo, hi: ``[T]``, visible keys ``[lo, hi)`` of each query; empty where ``lo == hi``.
        queries: of a tile; see :class:`~backends.triton_kernels.configs.TileShape`.

    Returns:
        ``[tiles * TILE_FIELDS]``, entry after entry.
    """
    entries: list[tuple[int, ...]] = []
    starts = [*cu_seqlens, num_tokens]
    for row, (start, end) in enumerate(pairwise(starts)):
        for first in range(start, end, queries):
            last = min(first + queries, end)
            entries.append((row, first, last - first, *_extremes(lo[first:last], hi[first:last])))
    entries.sort(key=_keys, reverse=True)
    out = array("i")
    for entry in entries:
        out.extend(entry)
        out.append(0)
    return out


def mark_extents(
    tiles: array[int], block_table: Sequence[int], table_width: int, block_size: int
) -> bool:
    """Note in each tile where its keys lie, if their blocks follow one another by number.

    Args:
        tiles: see :func:`query_tiles`; changed in place.
        block_table: ``[R * table_width]``, row after row.
        table_width: entries of a row.
        block_size: tokens of a block as the table counts blocks.

    Returns:
        Whether that is so for all tiles; else the marks mean nothing.
    """
    breaks: dict[int, list[int]] = {}  # entries of a row that do not follow the one before
    for at in range(0, len(tiles), TILE_FIELDS):
        row, low, high = tiles[at], tiles[at + 3], tiles[at + 4]
        if low >= high:
            continue
        base = row * table_width
        if row not in breaks:
            ids = block_table[base : base + table_width]
            breaks[row] = [i for i in range(1, len(ids)) if ids[i] != ids[i - 1] + 1]
        first, last = low // block_size, (high - 1) // block_size
        if bisect_right(breaks[row], first) != bisect_right(breaks[row], last):
            return False
        tiles[at + 7] = block_table[base + first] - first
    return True


def tile_capacity(num_tokens: int, num_rows: int, queries: int) -> int:
    """Tiles that are enough for any cut of ``num_tokens`` queries into ``num_rows`` rows.

    Args:
        num_tokens: queries with padding.
        num_rows: rows with padding.
        queries: of a tile.
    """
    if num_tokens == 0:
        return 0
    # each row, and the padding after the last, may end in a tile that is not full
    return min(num_tokens, num_tokens // queries + num_rows + 1)


def pad_tiles(tiles: array[int], capacity: int) -> array[int]:
    """Tiles followed by entries without queries, ``capacity`` in all.

    Raises:
        ValueError: more tiles than the capacity.
    """
    have = len(tiles) // TILE_FIELDS
    if have > capacity:
        raise ValueError(f"tiles: {have} do not fit the {capacity} that there is room for")
    return tiles + array("i", [0]) * ((capacity - have) * TILE_FIELDS)


def max_keys(tiles: Sequence[int]) -> int:
    """Keys of the tile that sees most: how long the longest program is."""
    spans = zip(tiles[3::TILE_FIELDS], tiles[4::TILE_FIELDS])
    return max((high - low for low, high in spans), default=0)


def _keys(entry: tuple[int, ...]) -> int:
    return entry[4] - entry[3]


def _extremes(lo: Sequence[int], hi: Sequence[int]) -> tuple[int, int, int, int]:
    """``lo_min, hi_max`` over the queries that see a key; ``lo_max, hi_min`` over all."""
    low, high = min(lo), max(hi)
    most, least = max(lo), min(hi)
    if most < least:  # every query sees a key
        return low, high, most, least
    seen = [(a, b) for a, b in zip(lo, hi) if a < b]
    if not seen:
        return 0, 0, 0, 0
    low, high = min(a for a, _ in seen), max(b for _, b in seen)
    if len(seen) < len(lo):  # one sees nothing, so no key is seen by all
        return low, high, high, low
    return low, high, most, least
