"""When prefix K/V may be reused; checked against a small transformer that knows no rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_manager import PrefixCacheError, prefix_cache_legality, usable_hit_len
from layout_core.visibility import Visibility

CAUSAL = Visibility(causal=True)


@pytest.mark.parametrize(
    ("hit", "usable"), [(0, 0), (3, 0), (4, 4), (8, 4), (10, 4), (11, 4), (12, 12), (15, 12)]
)
def test_a_hit_never_ends_inside_a_span(hit: int, usable: int) -> None:
    # field case 20: lmdeploy#4618; block 4, span [6, 10)
    assert usable_hit_len(hit, 4, [(6, 10)]) == usable


def test_rounding_out_of_one_span_may_fall_into_another() -> None:
    assert usable_hit_len(12, 4, [(2, 5), (7, 13)]) == 0
    assert usable_hit_len(12, 4, [(2, 4), (7, 13)]) == 4


@given(
    st.integers(0, 60),
    st.integers(1, 8),
    st.lists(st.integers(0, 40), max_size=8, unique=True),
)
def test_the_usable_hit_is_the_longest_that_is_aligned_and_in_no_span(
    hit: int, alignment: int, edges: list[int]
) -> None:
    edges = sorted(edges)
    spans = list(zip(edges[::2], edges[1::2]))
    best = max(
        length
        for length in range(hit + 1)
        if length % alignment == 0 and not any(a < length < b for a, b in spans)
    )
    assert usable_hit_len(hit, alignment, spans) == best


@pytest.mark.parametrize(
    ("spans", "prefix_len", "visibility", "edge"),
    [
        (None, 8, None, None),
        ([], 8, None, None),
        ([(2, 6)], 8, None, None),
        ([(2, 8), (8, 16)], 8, None, None),
        ([(6, 10)], 8, None, (6, 8)),
        (None, 8, Visibility(causal=False), (0, 8)),
        ([(2, 6)], 8, Visibility(causal=False), None),  # spans override non-causal
        (None, 8, Visibility(causal=False, window_left=2, window_right=2), (6, 8)),
        (None, 8, Visibility(causal=True, window_left=2), None),
        (None, 8, Visibility(causal=True, chunk=3), None),
        (None, 0, Visibility(causal=False), None),
    ],
)
def test_an_edge_from_prefix_to_target_is_found(
    spans: list[tuple[int, int]] | None,
    prefix_len: int,
    visibility: Visibility | None,
    edge: tuple[int, int] | None,
) -> None:
    # W6: vllm-omni#4710
    answer = prefix_cache_legality(spans, prefix_len, seq_len=16, visibility=visibility)
    assert answer.edge == edge
    assert answer.lossless == (edge is None)
    if edge is None:
        assert answer.reason is None
        answer.require()
    else:
        named = rf"query {edge[0]} of the prefix \[0, 8\) sees key {edge[1]} of the target"
        with pytest.raises(PrefixCacheError, match=named):
            answer.require()


def test_the_refusal_names_the_span_and_the_row() -> None:
    answer = prefix_cache_legality([(1, 3), (6, 10)], 8, where="row 'a'")
    assert answer.reason is not None
    assert answer.reason.startswith("row 'a': ")
    assert answer.reason.endswith("in the full span [6, 10)")


def _sees(spans: list[tuple[int, int]], query: int, key: int) -> bool:
    """Straight from the words: causal, and all of one's own span."""
    return key <= query or any(a <= query < b and key < b for a, b in spans)


def _prefix_kv(
    spans: list[tuple[int, int]], prefix_len: int, hidden: np.ndarray
) -> list[np.ndarray]:
    """K/V of the prefix in three layers of dense attention in float64."""
    rng = np.random.default_rng(7)
    length, width = hidden.shape
    mask = np.array([[_sees(spans, q, k) for k in range(length)] for q in range(length)])
    out = []
    for _ in range(3):
        q, k, v = (hidden @ rng.standard_normal((width, width)) for _ in range(3))
        out += [k[:prefix_len], v[:prefix_len]]
        scores = np.where(mask, q @ k.T / width**0.5, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        hidden = hidden + weights / weights.sum(axis=1, keepdims=True) @ v
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 11), st.lists(st.integers(0, 12), max_size=4, unique=True))
def test_the_answer_is_right_for_a_transformer(prefix_len: int, edges: list[int]) -> None:
    # steps 1 and 50 differ in the target alone: lossless means bit-identical prefix K/V
    edges = sorted(edges)
    spans = list(zip(edges[::2], edges[1::2]))
    rng = np.random.default_rng(3)
    step_1 = rng.standard_normal((12, 4))
    step_50 = step_1.copy()
    step_50[prefix_len:] = rng.standard_normal((12 - prefix_len, 4))
    same = all(
        np.array_equal(a, b)
        for a, b in zip(
            _prefix_kv(spans, prefix_len, step_1), _prefix_kv(spans, prefix_len, step_50)
        )
    )
    assert prefix_cache_legality(spans, prefix_len, seq_len=12).lossless == same


def test_malformed_input_raises() -> None:
    with pytest.raises(PrefixCacheError, match="prefix_len: expected an int >= 0, got -1"):
        prefix_cache_legality(None, -1)
    with pytest.raises(PrefixCacheError, match="seq_len: expected at least prefix_len 8, got 4"):
        prefix_cache_legality(None, 8, seq_len=4)
    with pytest.raises(PrefixCacheError, match="alignment: expected >= 1, got 0"):
        usable_hit_len(4, 0)
