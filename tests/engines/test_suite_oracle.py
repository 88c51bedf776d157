"""The oracle against itself and against cases small enough to do by hand; then the library's
intervals against the oracle's predicate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_core.errors import VisibilityError
from layout_core.rows import PagedAttentionRow
from layout_core.visibility import TileClass, Visibility, classify_tile, row_intervals
from tests.cases import random_steps, steps
from tests.engines.suite import mask_of
from tests.oracle import dense_attention, mask_from_intervals, sees, visible
from tests.tolerances import Mismatch, assert_close, assert_same_bytes

RULES = st.sampled_from(
    [
        {},
        {"causal": True},
        {"causal": True, "window_left": 2},
        {"causal": True, "window_left": 0, "window_right": 0},
        {"window_left": 1, "window_right": 3},
        {"window_left": 4},
        {"window_right": 0},
        {"causal": True, "chunk": 3},
        {"spans": []},
        {"spans": [(1, 3), (5, 6)]},
    ]
)


@given(RULES, st.integers(0, 7), st.integers(6, 9), st.integers(-4, 9), st.integers(0, 6))
@settings(max_examples=150, derandomize=True)
def test_the_grid_is_the_predicate_key_by_key(
    rule: dict[str, object], queries: int, keys: int, start: int, first: int
) -> None:
    grid = visible(queries, keys, kv_start_pos=start, first_key=first, **rule)  # type: ignore[arg-type]
    for i in range(queries):
        for k in range(keys):
            one = sees(start + i, k, seq_len=keys, first_key=first, **rule)  # type: ignore[arg-type]
            assert grid[i, k] == one, (i, k)


def test_attention_by_hand() -> None:
    """Two keys with scores 0 and ln 3: weights 1/4 and 3/4, LSE ln 4."""
    query = np.array([[[1.0]]])
    key = np.array([[[0.0]], [[np.log(3.0)]]])
    value = np.array([[[4.0, 0.0]], [[8.0, 1.0]]])
    output, lse = dense_attention(query, key, value, np.ones((1, 2), bool))
    np.testing.assert_allclose(output[0, 0], [7.0, 0.75])
    np.testing.assert_allclose(lse[0, 0], np.log(4.0))
    output, lse = dense_attention(query, key, value, np.ones((1, 2), bool), scale=0.0)
    np.testing.assert_allclose(output[0, 0], [6.0, 0.5])
    np.testing.assert_allclose(lse[0, 0], np.log(2.0))
    capped = dense_attention(query, key, value, np.ones((1, 2), bool), softcap=0.5)[1]
    second = np.exp(0.5 * np.tanh(np.log(3.0) / 0.5))
    np.testing.assert_allclose(capped[0, 0], np.log(1.0 + second))


def test_nothing_visible_gives_zeros_and_minus_infinity() -> None:
    mask = np.array([[False, False], [True, False]])
    key = np.array([[[1.0]], [[np.nan]]])
    output, lse = dense_attention(np.ones((2, 1, 1)), key, key, mask)
    assert output[0, 0, 0] == 0.0
    assert lse[0, 0] == -np.inf
    assert output[1, 0, 0] == 1.0, "a NaN that nobody sees must not spread"
    none = dense_attention(np.ones((2, 1, 1)), key[:0], key[:0], np.ones((2, 0), bool))
    assert not none[0].any()
    assert (none[1] == -np.inf).all()


def test_each_query_head_reads_its_own_kv_head() -> None:
    """Field case 15: 6 query heads over 2 KV heads and V[h] = h."""
    value = np.broadcast_to(np.array([0.0, 1.0])[None, :, None], (3, 2, 1))
    output, _ = dense_attention(np.ones((1, 6, 1)), value, value, np.ones((1, 3), bool))
    assert output[0, :, 0].tolist() == [0, 0, 0, 1, 1, 1]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes do not fit"):
        dense_attention(np.ones((1, 3, 4)), np.ones((2, 2, 4)), np.ones((2, 2, 4)), np.ones((1, 2)))


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.1]),
        ([np.nan], [1.0]),
        ([np.nan], [np.nan]),
        ([1.0], [-np.inf]),
        ([np.inf], [-np.inf]),
        ([-np.inf], [0.0]),
        ([1.0, 1.0], [1.0]),
    ],
)
def test_the_comparison_can_fail(got: list[float], expected: list[float]) -> None:
    with pytest.raises(Mismatch, match="here"):
        assert_close(got, expected, "attention", "float32", "here")
    if len(got) == len(expected) and not np.isnan(got).any():
        assert_close(got, got, "attention", "float32", "here")


def test_the_comparison_of_bytes_names_the_first_that_differs() -> None:
    assert_same_bytes(b"abc", b"abc")
    with pytest.raises(Mismatch, match="pool: 1 of 3 bytes differ; first at byte 1: got 0x62"):
        assert_same_bytes(b"abc", b"axc", "pool")
    with pytest.raises(Mismatch, match="pool: 2 bytes, expected 3"):
        assert_same_bytes(b"ab", b"abc", "pool")


# --- the library's intervals -------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 16])
def test_intervals_of_the_suites_steps_are_the_oracles(n: int) -> None:
    for step in steps(n):
        for index, r in enumerate(step.rows):
            spans = None if step.spans is None else step.spans[index]
            lo, hi = row_intervals(r, step.visibility, spans)
            got = mask_from_intervals(lo, hi, r.seq_len)
            assert (got == mask_of(step, index)).all(), (step.name, index)


@given(random_steps(block_size=4, max_rows=3, max_blocks=5))
@settings(max_examples=400, derandomize=True)
def test_intervals_of_random_rows_are_the_oracles(step: object) -> None:
    for index, r in enumerate(step.rows):  # type: ignore[attr-defined]
        spans = None if step.spans is None else step.spans[index]  # type: ignore[attr-defined]
        lo, hi = row_intervals(r, step.visibility, spans)  # type: ignore[attr-defined]
        assert len(lo) == len(hi) == r.query_len
        assert all(r.first_key <= a <= b <= r.seq_len for a, b in zip(lo, hi))
        got = mask_from_intervals(lo, hi, r.seq_len)
        assert (got == mask_of(step, index)).all()  # type: ignore[arg-type]


def test_field_case_19_spans() -> None:
    """Spans [2,6) and [8,16), queries 4 to 11: visible keys 6,6,7,8,16,16,16,16."""
    r = PagedAttentionRow("r", 8, 16, 4, sequence_id=0)
    lo, hi = row_intervals(r, Visibility(causal=True), [(2, 6), (8, 16)])
    assert list(lo) == [0] * 8
    assert list(hi) == [6, 6, 7, 8, 16, 16, 16, 16]


def test_field_case_12_bottom_right() -> None:
    """Causal, start -2, 5 queries over 3 keys: rows 0 and 1 see nothing."""
    r = PagedAttentionRow("r", 5, 3, -2, sequence_id=0, read_only=True)
    lo, hi = row_intervals(r, Visibility(causal=True))
    assert [b - a for a, b in zip(lo, hi)] == [0, 0, 1, 2, 3]


def test_field_case_13_window_counts() -> None:
    """300 queries, 4096 keys, left 333, bottom-right: query 0 sees 633 keys to the right's end."""
    r = PagedAttentionRow("r", 300, 4096, 3796, sequence_id=0)
    lo, hi = row_intervals(r, Visibility(causal=False, window_left=333))
    assert (lo[0], hi[0]) == (3463, 4096)
    assert hi[0] - lo[0] == 633
    assert sum(range(lo[0], hi[0])) / 633 == 3779


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5))
@settings(max_examples=200, derandomize=True)
def test_tile_classes_are_what_the_mask_says(pairs: list[tuple[int, int]]) -> None:
    lo, hi = [min(p) for p in pairs], [max(p) for p in pairs]
    mask = mask_from_intervals(lo, hi, 12)
    for start in range(0, 12, 3):
        tile = mask[:, start : start + 3]
        got = classify_tile(min(lo), max(lo), min(hi), max(hi), start, start + 3)
        if got is TileClass.SKIP:
            assert not tile.any()
        if got is TileClass.FULL:
            assert tile.all()
        # the extremes decide these exactly where every query sees something
        if all(a < b for a, b in zip(lo, hi)) and tile.all():
            assert got is TileClass.FULL


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(3, 3)], r"spans of request 'r'\[0\]: expected 0 <= start < end, got \[3, 3\)"),
        ([(0, 2), (1, 4)], r"\[1\]: \[1, 4\) overlaps or precedes a span that ends at 2"),
        ([(0, 9)], r"\[0, 9\) ends past seq_len 8"),
        ([(-1, 2)], r"got \[-1, 2\)"),
    ],
)
def test_malformed_spans_are_refused(spans: list[tuple[int, int]], message: str) -> None:
    r = PagedAttentionRow("r", 8, 8, sequence_id=0)
    with pytest.raises(VisibilityError, match=message):
        row_intervals(r, Visibility(causal=True), spans)


@pytest.mark.parametrize(
    "rule", [Visibility(causal=True, window_left=3), Visibility(causal=True, chunk=4)]
)
def test_spans_with_a_window_or_a_chunk_are_refused(rule: Visibility) -> None:
    r = PagedAttentionRow("r", 8, 8, sequence_id=0)
    with pytest.raises(VisibilityError, match="cannot be combined with a window or a chunk"):
        row_intervals(r, rule, [(0, 4)])
