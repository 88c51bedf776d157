"""Intervals of visible keys, against a predicate written from the table of rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_core import (
    PagedAttentionRow,
    TileClass,
    Visibility,
    classify_tile,
    row_intervals,
    visible_intervals,
)
from layout_core.errors import VisibilityError

Spans = list[tuple[int, int]]


def row(query_len: int, seq_len: int, start: int, first_key: int = 0) -> PagedAttentionRow:
    return PagedAttentionRow(
        "r",
        query_len=query_len,
        seq_len=seq_len,
        kv_start_pos=start,
        first_key=first_key,
        sequence_id=0,
        read_only=True,
    )


def sees(rule: Visibility, spans: Spans | None, p: int, k: int) -> bool:
    """Whether a query at ``p`` sees key ``k``, rule by rule."""
    if spans is not None:
        inside = [b for a, b in spans if a <= p < b]
        return k < inside[0] if inside else k <= p
    if rule.chunk is not None:
        return p // rule.chunk * rule.chunk <= k <= p
    if rule.causal and k > p:
        return False
    if rule.window_left is not None and k < p - rule.window_left:
        return False
    return rule.window_right is None or k <= p + rule.window_right


sides = st.one_of(st.none(), st.integers(0, 9))
rules = st.one_of(
    st.builds(Visibility, st.booleans(), sides, sides),
    st.builds(lambda chunk: Visibility(True, chunk=chunk), st.integers(1, 7)),
)


@st.composite
def drawn_spans(draw: st.DrawFn, seq_len: int) -> Spans | None:
    if draw(st.booleans()):
        return None
    cuts = sorted(draw(st.sets(st.integers(0, seq_len), max_size=6)))
    return [(a, b) for a, b in zip(cuts[::2], cuts[1::2])]


@given(st.data(), st.integers(0, 12), st.integers(0, 20), st.integers(-8, 16))
@settings(max_examples=400, deadline=None)
def test_intervals_equal_the_predicate(data: st.DataObject, count: int, keys: int, p0: int) -> None:
    first = data.draw(st.integers(0, keys))
    spans = data.draw(drawn_spans(keys))
    rule = data.draw(rules)
    if spans is not None:
        rule = Visibility(data.draw(st.booleans()))
    lo, hi = row_intervals(row(count, keys, p0, first), rule, spans)
    assert len(lo) == len(hi) == count
    for i in range(count):
        expected = [k for k in range(first, keys) if sees(rule, spans, p0 + i, k)]
        assert list(range(lo[i], hi[i])) == expected
        assert first <= lo[i] <= hi[i] <= keys


def test_spans_of_the_field() -> None:
    # vllm-omni#2981: spans [2, 6) and [8, 16), queries 4 to 11
    lo, hi = row_intervals(row(8, 16, 4), Visibility(False), [(2, 6), (8, 16)])
    assert (hi.tolist(), set(lo)) == ([6, 6, 7, 8, 16, 16, 16, 16], {0})
    lo, hi = row_intervals(row(3, 16, 4), Visibility(False), [])
    assert hi.tolist() == [5, 6, 7]  # an empty list means causal


def test_bottom_right_alignment_of_the_field() -> None:
    # flashinfer#4452: start -2, 5 queries, 3 keys
    lo, hi = row_intervals(row(5, 3, -2), Visibility(True))
    assert [b - a for a, b in zip(lo, hi)] == [0, 0, 1, 2, 3]
    # flashinfer#4972: 3 queries, 8 keys, start 5, window left 2, right open
    lo, hi = row_intervals(row(3, 8, 5), Visibility(False, window_left=2))
    assert list(zip(lo, hi)) == [(3, 8), (4, 8), (5, 8)]
    lo, hi = row_intervals(row(300, 4096, 3796), Visibility(False, window_left=333))
    assert hi[0] - lo[0] == 633


def test_vllms_sliding_window() -> None:
    assert Visibility.from_sliding_window(4, causal=True) == Visibility(True, 3, 0)
    assert Visibility.from_sliding_window(4, causal=False) == Visibility(False, 3, 3)
    assert Visibility.from_sliding_window(None, causal=True) == Visibility(True)
    with pytest.raises(VisibilityError, match=r"sliding_window: expected None or an int >= 1"):
        Visibility.from_sliding_window(0, causal=True)


def test_batches_are_packed_row_after_row() -> None:
    lo, hi = visible_intervals([row(2, 4, 2), row(0, 3, 0), row(1, 2, 1)], Visibility(True))
    assert (lo.tolist(), hi.tolist()) == ([0, 0, 0], [3, 4, 2])
    lo, hi = visible_intervals([row(2, 4, 2), row(1, 2, 1)], Visibility(True), [[(1, 4)], None])
    assert hi.tolist() == [4, 4, 2]
    with pytest.raises(VisibilityError, match=r"one entry for each of 1 rows, got 2"):
        visible_intervals([row(2, 4, 2)], Visibility(True), [None, None])


@pytest.mark.parametrize(
    ("fields", "wording"),
    [
        ({"window_left": -1}, r"visibility.window_left: expected None or an int >= 0, got -1"),
        ({"window_right": 1.0}, r"visibility.window_right: expected None or an int >= 0, got 1.0"),
        ({"chunk": 0}, r"visibility.chunk: expected None or an int >= 1, got 0"),
        ({"chunk": 2, "causal": False}, r"chunked attention is causal; got causal=False"),
        ({"chunk": 2, "window_left": 1}, r"cannot be combined with window_left"),
    ],
)
def test_malformed_rules(fields: dict[str, Any], wording: str) -> None:
    with pytest.raises(VisibilityError, match=wording):
        Visibility(**({"causal": True} | fields))


@pytest.mark.parametrize(
    ("spans", "wording"),
    [
        ([(2, 2)], r"\[0\]: expected 0 <= start < end, got \[2, 2\)"),
        ([(-1, 2)], r"expected 0 <= start < end, got \[-1, 2\)"),
        ([(0, 9)], r"\[0, 9\) ends past seq_len 8"),
        ([(0, 4), (3, 6)], r"\[1\]: \[3, 6\) overlaps or precedes a span that ends at 4"),
        ([(0, 4, 5)], r"expected a pair \(start, end\), got \(0, 4, 5\)"),
    ],
)
def test_malformed_spans(spans: Any, wording: str) -> None:
    with pytest.raises(VisibilityError, match=wording):
        row_intervals(row(2, 8, 0), Visibility(True), spans)


def test_spans_do_not_go_with_windows_or_chunks() -> None:
    for rule in (Visibility(True, 2), Visibility(True, chunk=2)):
        with pytest.raises(VisibilityError, match=r"cannot be combined with a window or a chunk"):
            row_intervals(row(2, 8, 0), rule, [(0, 2)])


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5),
    st.integers(0, 12),
    st.integers(0, 6),
)
@settings(deadline=None)
def test_tile_classes_are_safe_both_ways(
    drawn: list[tuple[int, int]], start: int, width: int
) -> None:
    intervals = [(min(pair), max(pair)) for pair in drawn]
    lows, highs = [a for a, _ in intervals], [b for _, b in intervals]
    tile = classify_tile(min(lows), max(lows), min(highs), max(highs), start, start + width)
    keys = range(start, start + width)
    seen = [[a <= k < b for k in keys] for a, b in intervals]
    if tile is TileClass.FULL:
        assert all(all(one) for one in seen)
    if tile is TileClass.SKIP:
        assert not any(any(one) for one in seen)
    if width and all(all(one) for one in seen):
        assert tile is TileClass.FULL
