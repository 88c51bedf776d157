"""One layout for a whole model, from what the workers' backends report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layout_core import (
    CacheConfig,
    FullAttentionSpec,
    KVCacheLayout,
    LayoutPreferenceWarning,
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from layout_core.errors import ConfigError, LayoutConflictError, UnknownLayoutError

DEFAULT = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]


def backend(*layouts: str) -> Any:
    return SimpleNamespace(supported_kv_cache_layouts=lambda: layouts or None)


def names(layouts: list[KVCacheLayout]) -> list[str]:
    return [layout.name for layout in layouts]


def config(layout: str | None = None) -> Any:
    return SimpleNamespace(cache_config=CacheConfig(kv_cache_layout=layout))


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ([], DEFAULT),
        ([backend(), object()], DEFAULT),
        ([backend("BLHNC", "LBNHC"), backend()], ["BLHNC", "LBNHC"]),
        ([backend("BLHNC", "LBNHC"), backend("BLHNC", "LBNHC")], ["BLHNC", "LBNHC"]),
        # two put BLHNC first, one LBNHC; LBHNC has no vote
        (
            [
                backend("BLHNC", "LBHNC", "LBNHC"),
                backend("LBNHC", "BLHNC", "LBHNC"),
                backend("BLHNC", "LBNHC", "LBHNC"),
            ],
            ["BLHNC", "LBNHC", "LBHNC"],
        ),
        # ties keep the order of the enum
        ([backend("BLNHC", "BLHNC"), backend("BLHNC", "BLNHC")], ["BLHNC", "BLNHC"]),
        # a vote for a layout that the other lacks counts for nothing
        ([backend("BHLNC", "LBNHC", "LBHNC"), backend("LBHNC", "LBNHC")], ["LBHNC", "LBNHC"]),
        ([backend("NHD")], ["LBNHC"]),
    ],
)
def test_what_a_worker_reports(backends: list[Any], expected: list[str]) -> None:
    assert names(get_supported_kv_cache_layouts(backends)) == expected


def test_backends_with_nothing_in_common() -> None:
    with pytest.raises(LayoutConflictError, match=r"got \[\['LBNHC'\], \['BLNHC'\]\]"):
        get_supported_kv_cache_layouts([backend("LBNHC"), backend("BLNHC")])
    with pytest.raises(LayoutConflictError, match=r"supports no KV cache layout"):
        get_supported_kv_cache_layouts([SimpleNamespace(supported_kv_cache_layouts=list)])
    with pytest.raises(UnknownLayoutError):
        get_supported_kv_cache_layouts([backend("XYZ")])


def test_the_first_candidate_is_recorded_under_its_canonical_name() -> None:
    run = config()
    assert resolve_kv_cache_layout(run, [["NHD", "LBHNC"]] * 2) is KVCacheLayout.LBNHC
    assert run.cache_config.kv_cache_layout == "LBNHC"


def test_a_layout_already_there_wins() -> None:
    run = config("BHLNC")
    assert resolve_kv_cache_layout(run, [["LBNHC"]]) is KVCacheLayout.BHLNC
    assert resolve_kv_cache_layout(run, [], requested="BHLNC") is KVCacheLayout.BHLNC
    with pytest.raises(LayoutConflictError, match=r"already resolved to BHLNC, got LBNHC"):
        resolve_kv_cache_layout(run, [["LBNHC"]], requested="LBNHC")


def spec(h: int, n: int, **changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=n, num_kv_heads=h, head_size=8, dtype="float16", **changes)


def test_unlike_shapes_need_a_block_compact_layout() -> None:
    unlike = [spec(2, 8), spec(1, 16)]
    assert resolve_kv_cache_layout(config(), [["LHBNC", "BLHNC"]], unlike).name == "BLHNC"
    assert resolve_kv_cache_layout(config(), [["LHBNC", "BLHNC"]], [spec(2, 8)] * 2).name == "LHBNC"
    run = config()
    with pytest.raises(LayoutConflictError, match=r"need a block-compact layout, got \['LHBNC'"):
        resolve_kv_cache_layout(run, [["LHBNC", "BHLNC"]], unlike)
    assert run.cache_config.kv_cache_layout is None


def test_sharded_beside_replicated_layers_need_b_outermost() -> None:
    mixed = [spec(2, 8), spec(2, 16, dcp_sharded=False)]
    assert resolve_kv_cache_layout(config(), [["LBNHC", "BLNHC"]], mixed).name == "BLNHC"
    with pytest.raises(LayoutConflictError, match=r"need a layout with B outermost"):
        resolve_kv_cache_layout(config(), [["LBNHC"]], mixed)


def test_requests_and_preferences() -> None:
    run = config()
    assert resolve_kv_cache_layout(run, [DEFAULT], requested="HND") is KVCacheLayout.LBHNC
    with pytest.raises(
        LayoutConflictError, match=r"requested: expected one of \['LBNHC'\], got BL"
    ):
        resolve_kv_cache_layout(config(), [["LBNHC"]], requested="BLNHC")
    assert resolve_kv_cache_layout(config(), [DEFAULT], preferred="BLHNC").name == "BLHNC"
    with pytest.warns(LayoutPreferenceWarning, match=r"BLHNC is none of \['LBNHC'\]; using LBNHC"):
        layout = resolve_kv_cache_layout(config(), [["LBNHC"]], preferred="BLHNC")
    assert layout.name == "LBNHC"


@pytest.mark.parametrize(
    ("reported", "wording"),
    [
        ([], r"at least one layout of each worker, got \[\]"),
        ([["LBNHC"], []], r"at least one layout of each worker"),
        ([["LBNHC"], ["LBHNC"]], r"supported_layouts\[1\]: workers must report the same"),
        ([["LBNHC", "LBHNC"], ["LBHNC", "LBNHC"]], r"supported_layouts\[1\]"),
    ],
)
def test_workers_must_report_alike(reported: list[list[str]], wording: str) -> None:
    run = config()
    with pytest.raises(ConfigError, match=wording):
        resolve_kv_cache_layout(run, reported)
    assert run.cache_config.kv_cache_layout is None
