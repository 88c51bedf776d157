"""The work list of an attention step: every query once, and bounds that are safe both ways."""

from __future__ import annotations

from array import array
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.triton_kernels.tiles import (
    TILE_FIELDS,
    mark_extents,
    pad_tiles,
    query_tiles,
    tile_capacity,
)


def entries(tiles: array[int]) -> list[list[int]]:
    return [tiles[i : i + TILE_FIELDS].tolist() for i in range(0, len(tiles), TILE_FIELDS)]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int, list[int], list[int], int]:
    lengths = draw(st.lists(st.integers(0, 9), min_size=0, max_size=5))
    cu = [0, *accumulate(lengths)]
    total = cu[-1] + draw(st.integers(0, 7))
    lo = [draw(st.integers(0, 20)) for _ in range(total)]
    hi = [a + draw(st.integers(0, 20)) for a in lo]
    lo[cu[-1] :] = hi[cu[-1] :] = [0] * (total - cu[-1])
    return cu, total, lo, hi, draw(st.integers(1, 6))


@settings(max_examples=300, deadline=None)
@given(steps())
def test_tiles_cover_queries_once_and_bound_what_they_see(
    step: tuple[list[int], int, list[int], list[int], int],
) -> None:
    cu, total, lo, hi, queries = step
    found = entries(query_tiles(cu, total, lo, hi, queries))
    covered = sorted(q for _, first, count, *_ in found for q in range(first, first + count))
    assert covered == list(range(total))
    assert len(found) <= tile_capacity(total, len(cu) - 1, queries)
    lengths = [high - low for _, _, _, low, high, *_ in found]
    assert lengths == sorted(lengths, reverse=True)
    for row, first, count, lo_min, hi_max, lo_max, hi_min, rest in found:
        assert 1 <= count <= queries
        assert rest == 0
        if first < cu[-1]:
            assert cu[row] <= first < first + count <= cu[row + 1]
        mine = range(first, first + count)
        for key in range(45):
            seen = [lo[q] <= key < hi[q] for q in mine]
            if any(seen):
                assert lo_min <= key < hi_max
            if lo_max <= key < hi_min:
                assert all(seen)
        some = [q for q in mine if lo[q] < hi[q]]
        if some:
            assert (lo_min, hi_max) == (min(lo[q] for q in some), max(hi[q] for q in some))
        else:
            assert (lo_min, hi_max) == (0, 0)


def test_a_causal_row_by_hand() -> None:
    tiles = query_tiles([0, 5], 5, [0] * 5, [3, 4, 5, 6, 7], 2)
    assert entries(tiles) == [
        [0, 4, 1, 0, 7, 0, 7, 0],
        [0, 2, 2, 0, 6, 0, 5, 0],
        [0, 0, 2, 0, 4, 0, 3, 0],
    ]


def test_padding_has_no_queries_and_must_fit() -> None:
    tiles = query_tiles([0, 3], 3, [0] * 3, [3] * 3, 2)
    assert entries(pad_tiles(tiles, 4))[2:] == [[0] * TILE_FIELDS] * 2
    with pytest.raises(ValueError, match="2 do not fit the 1 that there is room for"):
        pad_tiles(tiles, 1)


def test_no_queries_no_tiles() -> None:
    assert not query_tiles([0, 0], 0, [], [], 4)
    assert tile_capacity(0, 3, 4) == 0


def test_extents_are_found_for_each_tile() -> None:
    """Blocks 5, 6, 7, then 2, 3: tiles that do not reach over the break are dense."""
    table = [5, 6, 7, 2, 3, 0]
    tiles = query_tiles([0, 2, 3], 3, [0, 13, 0], [12, 20, 0], 1)
    assert mark_extents(tiles, [*table, *[0] * 6], 6, 4)
    marks = {entry[1]: entry[7] for entry in entries(tiles)}
    assert marks == {0: 5, 1: 2 - 3, 2: 0}
    over = query_tiles([0, 1], 1, [0], [13], 1)
    assert not mark_extents(over, table, 6, 4)
    inside = query_tiles([0, 1], 1, [4], [12], 1)
    assert mark_extents(inside, table, 6, 4)
    assert entries(inside)[0][7] == 6 - 1
