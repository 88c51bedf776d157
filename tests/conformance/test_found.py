"""Faults that the comparison with vLLM found, as small cases that need no vLLM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layout_core import (
    CacheConfig,
    CrossAttentionSpec,
    FullAttentionSpec,
    IllegalCombinationError,
    KVCacheGroupSpec,
    KVCacheLayout,
    MergeError,
    ModelConfig,
    RunConfig,
    SchedulerConfig,
    SlidingWindowSpec,
    get_kv_cache_configs,
    get_kv_cache_groups,
    make_config,
)

FULL = FullAttentionSpec(4, num_kv_heads=2, head_size=4, dtype="float16")  # type: ignore[arg-type]
ALIGNED = replace(FULL, block_stride_alignment=256)
WINDOW = SlidingWindowSpec(
    4,
    num_kv_heads=2,
    head_size=4,
    dtype="float16",  # type: ignore[arg-type]
    sliding_window=8,
)


@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.LBHNC])
def test_groups_with_blocks_unequally_far_apart_do_not_overlay(layout: KVCacheLayout) -> None:
    groups = [KVCacheGroupSpec(["a"], ALIGNED), KVCacheGroupSpec(["b"], FULL)]
    with pytest.raises(IllegalCombinationError, match=r"lie \[128, 256\] bytes apart"):
        make_config(groups, 4, layout)
    assert make_config(groups, 4, KVCacheLayout.BLNHC).kv_cache_tensors[1].block_stride == 256


def test_layers_of_two_classes_do_not_merge_for_sharing_their_fields() -> None:
    cross = CrossAttentionSpec(4, num_kv_heads=2, head_size=4, dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(MergeError, match="CrossAttentionSpec"):
        CrossAttentionSpec.merge([cross, WINDOW])  # type: ignore[list-item]
    config = RunConfig(ModelConfig(64), CacheConfig(kv_cache_layout="LBNHC"))
    assert len(get_kv_cache_groups(config, {"cross": cross, "window": WINDOW})) == 2


def test_a_stage_without_a_layer_of_a_packed_group_gets_no_tensor_of_it() -> None:
    wide, other = replace(FULL, head_size=8, head_size_v=8), replace(FULL, block_size=8)
    config = RunConfig(ModelConfig(64), CacheConfig(kv_cache_layout="BLNHC"))
    stages = [{"a": FULL, "b": wide}, {"c": FULL, "d": other}]
    first, second = get_kv_cache_configs(config, stages, [1 << 20, 1 << 20])
    assert [t.layers for t in first.kv_cache_tensors] == [["a"], ["b"]]
    assert [t.layers for t in second.kv_cache_tensors] == [["c"], ["d"]]
    assert first.num_blocks == second.num_blocks


def test_replicated_layers_are_promoted_apart_from_sharded_ones() -> None:
    config = RunConfig(
        ModelConfig(64),
        CacheConfig(kv_cache_layout="LBNHC"),
        SchedulerConfig(disable_hybrid_kv_cache_manager=True),
    )
    layers = {"full": FULL, "window": WINDOW, "draft": replace(FULL, dcp_sharded=False)}
    groups = get_kv_cache_groups(config, layers)
    assert [group.layer_names for group in groups] == [["full"], ["window"], ["draft"]]
    assert {type(group.kv_cache_spec) for group in groups} == {FullAttentionSpec}
    assert [group.kv_cache_spec.is_dcp_sharded for group in groups] == [True, True, False]
