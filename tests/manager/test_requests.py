"""Rows and contexts are checked when they are made; guidance decides how many rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from block_manager import (
    DiffusionKVContext,
    DiffusionKVRequest,
    PrefixCacheError,
    PrefixFeature,
    RequestError,
    cfg_rows,
)
from layout_core.errors import LayoutError, VisibilityError

GOOD: dict[str, Any] = {"sequence_id": 0, "prefix_len": 4, "target_len": 3, "seq_len": 8}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sequence_id": -1}, RequestError, "row 'r': sequence_id: expected an int >= 0, got -1"),
        ({"prefix_len": 1.0}, RequestError, "prefix_len: expected an int >= 0, got 1.0"),
        ({"target_len": 0}, RequestError, "target_len: expected an int >= 1, got 0"),
        ({"seq_len": 6}, RequestError, "expected at most seq_len 6, got 4 \\+ 3"),
        (
            {"cache_token_ids": (1, 2, 3)},
            RequestError,
            "cache_token_ids: expected at least the 4 tokens of the prefix, got 3",
        ),
        (
            {"cache_token_ids": (1, 2, "3", 4)},
            PrefixCacheError,
            r"row 'r': cache_token_ids\[2\]: expected an int of at most 64 bits, got '3'",
        ),
        ({"cache_namespace": ""}, PrefixCacheError, "namespace: expected a non-empty string"),
        ({"full_spans": [(2, 9)]}, VisibilityError, "row 'r': full_spans"),
        ({"full_spans": [(2, 4), (3, 5)]}, VisibilityError, "sorted and disjoint"),
        (
            {"mm_features": [PrefixFeature("a", 2, 3), PrefixFeature("b", 4, 1)]},
            RequestError,
            r"'b' at \[4, 5\): expected sorted, disjoint positions within 8",
        ),
        ({"mm_features": [PrefixFeature("a", 6, 3)]}, RequestError, r"'a' at \[6, 9\)"),
        ({"mm_features": ["image"]}, RequestError, "expected PrefixFeature values"),
        (
            {"kv_contexts": [DiffusionKVContext("c", "cross", 2)] * 2},
            RequestError,
            "context_id 'c' stands twice",
        ),
        ({"kv_contexts": ["c"]}, RequestError, "expected DiffusionKVContext values, got 'c'"),
    ],
)
def test_a_malformed_row_is_refused(
    change: dict[str, Any], error: type[LayoutError], message: str
) -> None:
    with pytest.raises(error, match=message):
        DiffusionKVRequest("r", **{**GOOD, **change})


def test_a_row_needs_a_name() -> None:
    with pytest.raises(RequestError, match="request_id: expected a non-empty string, got ''"):
        DiffusionKVRequest("", **GOOD)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("", "cross", 2), "context context_id: expected a non-empty string"),
        (("c", "", 2), "context cache_role: expected a non-empty string"),
        (("c", "cross", 0), "context 'c': num_tokens: expected an int >= 1, got 0"),
    ],
)
def test_a_malformed_context_is_refused(args: tuple[str, str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        DiffusionKVContext(*args)


def test_features_of_vllm_are_read_by_attribute() -> None:
    foreign = SimpleNamespace(
        identifier="sha", mm_position=SimpleNamespace(offset=1, length=2), modality="image"
    )
    request = DiffusionKVRequest("r", **GOOD, mm_features=[foreign])
    assert request.mm_features == (PrefixFeature("sha", 1, 2),)


def test_keys_cover_the_prefix_alone_and_need_tokens() -> None:
    request = DiffusionKVRequest("r", **GOOD, cache_token_ids=range(8))
    assert len(request.keys(2)) == 2
    assert request.keys(2) is request.keys(2)
    assert DiffusionKVRequest("r", **GOOD).keys(2) == []


@pytest.mark.parametrize(
    ("guidance", "branches", "ranks", "rows"),
    [
        (0.0, 2, 1, 1),
        (1.0, 2, 1, 1),  # field case 21: vllm-omni#6700
        (2.0, 2, 1, 2),
        (1.0, 2, 2, 1),
        (7.5, 2, 2, 1),  # CFG-parallel: one row a rank
        (7.5, 3, 1, 3),
        (7.5, 3, 2, 2),  # the fullest rank counts
        (7.5, 3, 3, 1),
    ],
)
def test_rows_follow_from_guidance(guidance: float, branches: int, ranks: int, rows: int) -> None:
    assert cfg_rows(guidance, branches=branches, cfg_parallel_size=ranks) == rows


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"branches": 0}, "branches: expected an int >= 1, got 0"),
        ({"cfg_parallel_size": 3}, r"cfg_parallel_size: expected an int in \[1, 2\], got 3"),
        ({"cfg_parallel_size": 0}, "got 0"),
    ],
)
def test_impossible_branches_are_refused(kwargs: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        cfg_rows(2.0, **kwargs)


def test_guidance_that_is_no_number_is_refused() -> None:
    with pytest.raises(RequestError, match="guidance_scale: expected a number, got nan"):
        cfg_rows(float("nan"))
